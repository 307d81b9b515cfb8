"""What several commands read of a store: the store itself, and the forecasts that its measurements carry."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from forecast_autotune.records import Candidate, Measurement
from forecast_autotune.settings import parse_user_directory
from forecast_autotune.store import Store
from forecast_autotune.store.record_files import check_folders

_NORMAL_QUANTILE_95 = 1.6448536269514722
"""Half the width of a normal's central 90 %, in standard deviations."""


def open_store(options: argparse.Namespace) -> Store:
    """The store of `--store`, else the environment's. Raises `StoreError` where a file is in a folder's place."""
    store = Store.default(None if options.store is None else parse_user_directory(options.store))
    if store.root is not None:
        check_folders(store.root)
    return store


def first_forecasts(rows: Sequence[Measurement]) -> dict[Candidate, dict[str, float]]:
    """What was forecast of each candidate right before it was first measured, in milliseconds.

    `low_ms` and `high_ms` bound the central 90 %. A candidate measured without a forecast is left out.
    """
    found: dict[Candidate, dict[str, float]] = {}
    for m in rows:
        noted = m.extra.get("forecast")
        if m.candidate in found or not isinstance(noted, Mapping):
            continue
        values = [noted.get(name) for name in ("log2_ms", "sd", "p_fail")]
        # A table from elsewhere may carry anything under this name.
        if not all(isinstance(v, int | float) and abs(v) < 60 for v in values):
            continue
        point, sd, p_fail = (float(v) for v in values if v is not None)
        found[m.candidate] = {
            "ms": 2.0**point,
            "low_ms": 2.0 ** (point - _NORMAL_QUANTILE_95 * sd),
            "high_ms": 2.0 ** (point + _NORMAL_QUANTILE_95 * sd),
            "p_fail": p_fail,
        }
    return found
