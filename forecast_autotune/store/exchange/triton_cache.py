"""Import of the timings that `triton.autotune(cache_results=True)` left behind."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError, StoreError
from forecast_autotune.file_access import read_regular
from forecast_autotune.records import Candidate, Config, Device, Kernel, Measurement, Outcome, Problem
from forecast_autotune.records.bounded_json import decode_document
from forecast_autotune.records.json_fields import MALFORMED
from forecast_autotune.records.table import Table
from forecast_autotune.store.files import StoreWarning

_SUFFIX = ".autotune.json"
PROTOCOL = "triton-cache"
"""Timing protocol of imported measurements: Triton's default benchmarker, whatever it was then."""


def holds_timings(directory: Path) -> bool:
    """Whether a file of timings is below a directory, at any depth."""
    return next(directory.rglob(f"*{_SUFFIX}"), None) is not None


def import_triton_cache(directory: Path, device: Device) -> list[Table]:
    """Read every `*.autotune.json` below a Triton cache directory, one table per file.

    The files name neither device, source nor toolchain: `device` says where they were measured, and
    the rest stays empty, so such a table is prior knowledge and never answers for a problem of its
    own. The tuning key's values and dtypes become `Problem.key`. A time of infinity, which Triton
    writes only for configs that cannot be built or launched, becomes `out_of_resources`.

    Malformed files, and configs in them, are skipped with a `StoreWarning`. Raises `StoreError` if there is no
    such directory.
    """
    if not directory.is_dir():
        raise StoreError(
            f"{directory} is no directory: pass the Triton cache, $TRITON_CACHE_DIR or ~/.triton/cache"
        )
    tables = []
    for path in sorted(directory.rglob(f"*{_SUFFIX}")):
        try:
            tables.append(_table(path, device))
        except (OSError, *MALFORMED) as error:
            reason = f"{type(error).__name__}: {error}"[:200]
            warnings.warn(
                f"{path}: skipped, not an autotune cache file ({reason})", StoreWarning, stacklevel=2
            )
    return tables


def _table(path: Path, device: Device) -> Table:
    data = decode_document(read_regular(path).decode("utf-8"))
    key, timings = data["key"], data["configs_timings"]
    if not isinstance(key, list) or not isinstance(timings, list):
        raise RecordError("key and configs_timings must be lists")
    problem = Problem.of(
        Kernel(path.name.removesuffix(_SUFFIX)),
        (),
        device,
        key=[part if isinstance(part, str) else json.dumps(part) for part in key],
        # Triton's directory name hashes source, compiler and config list, all unknown to us: entries
        # that differ in them must not be mixed.
        identity=[path.parent.name],
    )
    at = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    table = Table(replace(problem, extra={"imported_from": PROTOCOL}))
    bad: list[str] = []
    for number, entry in enumerate(timings):
        try:
            config, times = entry
            table.measurements.append(_measurement(problem.id, config, times, at))
        except MALFORMED as error:
            bad.append(f"the first, number {number}: {type(error).__name__}: {error}"[:200])
    if bad and not table.measurements:
        raise RecordError(f"none of its configs can be read ({bad[0]})")
    if bad:
        message = f"{path}: skipped {len(bad)} of {len(timings)} configs ({bad[0]})"
        warnings.warn(message, StoreWarning, stacklevel=3)
    return table


def _measurement(problem_id: str, config: Mapping[str, Any], times: object, at: str) -> Measurement:
    candidate = Candidate(Config.from_json(config))
    hash(candidate)  # a list where a number belongs would fail far from here
    # Triton asks its benchmarker for the quantiles 0.5, 0.2 and 0.8; a user's own may return one number.
    given: list[Any] = times if isinstance(times, list) else [times]
    if not given or any(isinstance(t, bool) or not isinstance(t, int | float) for t in given):
        raise RecordError(f"times must be numbers, got {times!r:.60}")
    shown = [float(t) for t in given[:3]]
    if shown[0] == math.inf:
        extra = {"message": "inf in triton's cache"}
        return Measurement(
            problem_id, candidate, Outcome.OUT_OF_RESOURCES, protocol=PROTOCOL, at=at, extra=extra
        )
    median, p20, p80 = shown if len(shown) == 3 else (shown[0], None, None)
    return Measurement(problem_id, candidate, Outcome.OK, median, p20, p80, protocol=PROTOCOL, at=at)
