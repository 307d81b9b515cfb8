"""The parts of a store that several commands read: the store itself, and the forecasts that its measurements carry."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from forecast_autotune.commands.output import UsageError
from forecast_autotune.file_access import misplaced_file
from forecast_autotune.records import Candidate, Decision, Measurement, Problem
from forecast_autotune.settings import NO_HOME, NOWHERE, default_directory, parse_user_directory
from forecast_autotune.store import Store, StoreWarning
from forecast_autotune.store.bundles import Bundle
from forecast_autotune.store.files import bundle_text, check_folders, is_bundle, newer_layout_text

_NORMAL_QUANTILE_95 = 1.6448536269514722
"""Half the width of a normal's central 90 %, in standard deviations."""


def open_store(options: argparse.Namespace, *, to_read: bool = False) -> Store:
    """The store of `--store`, else the environment's; of a bundle, `to_read`, its rows. Raises as `own_root` does."""
    root = own_root(options, to_read=to_read)
    if message := newer_layout_text(root):
        warnings.warn(message, StoreWarning, stacklevel=2)
    return _store_of_bundle(Bundle.open(root)) if is_bundle(root) else Store.default(root)


def bundled_stores(store: Store) -> list[Store]:
    """The rows of the bundles below a store, each as a store in memory, in the order in which they are asked."""
    return [_store_of_bundle(bundle) for bundle in store.layers.bundles]


def own_root(options: argparse.Namespace, *, to_read: bool = False) -> Path:
    """The folder of the store of `--store`, else the environment's.

    Raises `UsageError` for a file, and unless it is only `to_read` for a bundle, or a user without a home; `StoreError`
    where a file is in the place of a folder in it.
    """
    root = (default_directory() if options.store is None else parse_user_directory(options.store)).absolute()
    if message := misplaced_file(root):
        raise UsageError(
            f"{root} is {message} where a folder of the store belongs: move it away, or name another"
        )
    check_folders(root)
    if root == NOWHERE and not to_read:
        raise UsageError(f"{NO_HOME}, or name a folder by --store")
    if is_bundle(root) and not to_read:
        raise UsageError(bundle_text(root))
    return root


def _store_of_bundle(bundle: Bundle) -> Store:
    """The rows of a bundle as a store in memory."""
    store = Store(None)
    for kernel in bundle.kernels():
        rows = bundle.rows(kernel)
        problems = {name: Problem.from_json(row.data) for name, row in rows.problems.items()}
        for name, problem in problems.items():
            store.add_all(problem, [Measurement.from_json(row.data) for row in rows.of_problem(name)])
        for name, row in rows.decisions.items():
            store.put_decision(problems[name], Decision.from_json(row.data))
    store.root = bundle.path  # what commands say that they have read
    return store


def first_forecasts(problem: Problem, rows: Sequence[Measurement]) -> dict[Candidate, dict[str, float]]:
    """The forecast of each candidate right before it was first measured, in milliseconds.

    `low_ms` and `high_ms` bound the central 90 %. A candidate measured without a forecast is left out, and so is
    the first one on a null device: no forecast knows the level of invented times.
    """
    results: dict[Candidate, dict[str, float]] = {}
    excluded = {m.candidate for m in rows[:1] if problem.device.name.startswith("null ")}
    for m in rows:
        note = m.extra.get("forecast")
        if m.candidate in results or m.candidate in excluded or not isinstance(note, Mapping):
            continue
        values = [note.get(name) for name in ("log2_ms", "sd", "p_fail")]
        # A table from elsewhere may carry anything under this name.
        if not all(isinstance(v, int | float) and abs(v) < 60 for v in values):
            continue
        point, sd, p_fail = (float(v) for v in values if v is not None)
        results[m.candidate] = {
            "ms": 2.0**point,
            "low_ms": 2.0 ** (point - _NORMAL_QUANTILE_95 * sd),
            "high_ms": 2.0 ** (point + _NORMAL_QUANTILE_95 * sd),
            "p_fail": p_fail,
        }
    return results


def open_named_store(options: argparse.Namespace, *, to_read: bool = True) -> Store:
    """As `open_store`. Raises `UsageError` for a folder of `--store` that is not there."""
    if options.store is not None:
        check_folder("--store", options.store)
    return open_store(options, to_read=to_read)


def check_folder(option: str, text: str) -> Path:
    """The folder that an option names. Raises `UsageError` where nothing is."""
    path = parse_user_directory(text)
    if not path.exists():
        raise UsageError(f"{option} {text}: there is no such folder")
    return path
