"""Surrogates fitted without a family of kernels, from the recorded tables."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import ROOT
from benchmarks.lib.result_files import say
from forecast_autotune.surrogates.learned import LearnedModel, LearnedSurrogate, shipped_model
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_train.splits import make_folds
from forecast_train.surrogate.fit import fit_model

TABLES = ("corpus_h200.jsonl.xz", "corpus_h200_2.jsonl.xz")
"""Beside those of the package."""


def table_paths() -> list[Path]:
    """The recorded tables that surrogates are fitted to."""
    return [*shipped_tables(), *(ROOT / "benchmarks" / "data" / name for name in TABLES)]


def surrogate_without(family: str, by_family: Mapping[str, Any]) -> LearnedSurrogate:
    """The surrogate without a family's kernels; the shipped one where no table is of the family."""
    if family in by_family:
        begin = time.perf_counter()
        model = fit_model(list(by_family[family].train))
        say(f"fitted without {family} in {time.perf_counter() - begin:.0f} s")
        return LearnedSurrogate(replace(model, about={**(model.about or {}), "without": family}))
    return shipped_surrogate()


def shipped_surrogate() -> LearnedSurrogate:
    """The one that the package ships. Raises `ValueError` if there is none."""
    model = shipped_model()
    if model is None:
        raise ValueError("this package ships no model: fit one with `forecast-autotune train surrogate`")
    return LearnedSurrogate(replace(model, about={**(model.about or {}), "without": "nothing: as shipped"}))


def surrogates_by_family(families: Sequence[str], folder: Path) -> dict[str, Surrogate]:
    """A surrogate for every family of kernels, fitted without it; those in the folder are not fitted again.

    Raises `ValueError` for a model in the folder that was fitted with the family.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [f for f in families if not (folder / f"{f}.npz").is_file()]
    if missing:
        by_family = {fold.name: fold for fold in make_folds(load(table_paths()), "family")}
        for family in missing:
            surrogate_without(family, by_family).model.save(folder / f"{family}.npz")
    found: dict[str, Surrogate] = {}
    for family in families:
        model = LearnedModel.load(folder / f"{family}.npz")
        without = (model.about or {}).get("without")
        # No recorded table is of some families: then the shipped surrogate has not seen them either.
        if without not in (family, "nothing: as shipped"):
            raise ValueError(f"{family}.npz was fitted without {without}: give another folder")
        found[family] = LearnedSurrogate(model)
    return found
