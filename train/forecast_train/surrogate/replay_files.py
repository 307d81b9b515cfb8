"""Replays on disk: curves can be fitted again, in another way, without playing the tables for an hour."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from forecast_autotune.errors import RecordError
from forecast_autotune.records.table import dump_line, read_lines
from forecast_autotune.store.files import write_atomically
from forecast_train.surrogate.calibration_curves import ReplayRecord
from forecast_train.surrogate.replay_observation import ReplayStep

_ARRAYS = ("p_within", "within", "z")
_STORED_DIGITS = 5


def write_replays(path: Path, surrogate: str, seen: Sequence[ReplayRecord]) -> None:
    """Write gzipped JSON lines, atomically: the surrogate's `name/version`, then one replay a line."""
    lines = [dump_line({"surrogate": surrogate, "replays": len(seen)})]
    for one in seen:
        steps = [{**asdict(s), **{n: _json_numbers(getattr(s, n)) for n in _ARRAYS}} for s in one.steps]
        lines.append(dump_line({**vars(one), "steps": steps}))
    write_atomically(path, gzip.compress("".join(lines).encode()))


def read_replays(path: Path) -> tuple[str, list[ReplayRecord]]:
    """What `write_replays` wrote. Raises `RecordError` for anything else, naming the remedy."""
    try:
        head, *lines = [data for _, data in read_lines(path)]
        found = [
            ReplayRecord(**{**line, "steps": tuple(map(_step_from_json, line["steps"]))}) for line in lines
        ]
        if len(found) != head["replays"]:
            raise ValueError(f"{len(found)} replays of {head['replays']}")
        return str(head["surrogate"]), found
    except (OSError, RecordError, ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"{path}: no whole file of replays ({error!r}); delete it to play them anew"
        ) from error


def _json_numbers(values: Any) -> list[float]:
    return [round(float(x), _STORED_DIGITS) for x in values]


def _step_from_json(data: dict[str, Any]) -> ReplayStep:
    return ReplayStep(**{**data, **{name: np.array(data[name], dtype=float) for name in _ARRAYS}})
