"""A small store and its bundle for tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from forecast_autotune.store import Store
from forecast_autotune.store.bundles import BundleOptions, write_bundle
from forecast_autotune.store.merging import StoreFolder
from tests.core.store.stored import A100, decided, measured, problem

PROBLEMS = [problem(), problem(2048), problem(kernel="softmax"), problem(device=A100)]


def filled(root: Path) -> StoreFolder:
    """A store with three measurements and a decision on each problem."""
    store = Store(root)
    for second, p in enumerate(PROBLEMS):
        at = f"2026-01-01T00:00:0{second}+00:00"
        for block, ms in ((16, 0.5), (32, 1.0), (64, None)):
            store.add(replace(p, ttir={"BLOCK=16": "module {}"}), measured(p, block, ms, at))
        store.put_decision(p, replace(decided(p), at=at, median_ms=0.5))
    return StoreFolder(root)


def bundle(folder: Path, options: BundleOptions | None = None) -> Path:
    """A bundle of such a store."""
    write_bundle(filled(folder / "source"), folder / "bundle", options)
    return folder / "bundle"
