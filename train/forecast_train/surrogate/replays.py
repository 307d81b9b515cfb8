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
from forecast_autotune.store.files import write_whole
from forecast_train.surrogate.curves import Seen
from forecast_train.surrogate.observe import Step

_ARRAYS = ("p_within", "within", "z")
_DIGITS = 5


def save(path: Path, surrogate: str, seen: Sequence[Seen]) -> None:
    """Write gzipped JSON lines, atomically: the surrogate's `name/version`, then one replay a line."""
    lines = [dump_line({"surrogate": surrogate, "replays": len(seen)})]
    for one in seen:
        steps = [{**asdict(s), **{n: _plain(getattr(s, n)) for n in _ARRAYS}} for s in one.steps]
        lines.append(dump_line({**vars(one), "steps": steps}))
    write_whole(path, gzip.compress("".join(lines).encode()))


def read(path: Path) -> tuple[str, list[Seen]]:
    """What `save` wrote. Raises `RecordError` for anything else, naming the remedy."""
    try:
        head, *lines = [data for _, data in read_lines(path)]
        found = [Seen(**{**line, "steps": tuple(map(_step, line["steps"]))}) for line in lines]
        if len(found) != head["replays"]:
            raise ValueError(f"{len(found)} replays of {head['replays']}")
        return str(head["surrogate"]), found
    except (OSError, RecordError, ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"{path}: no whole file of replays ({error!r}); delete it to play them anew"
        ) from error


def _plain(values: Any) -> list[float]:
    return [round(float(x), _DIGITS) for x in values]


def _step(data: dict[str, Any]) -> Step:
    return Step(**{**data, **{name: np.array(data[name], dtype=float) for name in _ARRAYS}})
