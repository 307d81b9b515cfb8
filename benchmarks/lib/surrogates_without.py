"""Surrogates fitted without a family of kernels, from the recorded tables."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import ROOT
from benchmarks.lib.result_files import say
from forecast_autotune.surrogates.learned import LearnedSurrogate, shipped_model
from forecast_autotune.tuning.replay import shipped_tables
from forecast_train.surrogate.fit import fit_model

TABLES = ("corpus_h200.jsonl.gz", "corpus_h200_2.jsonl.gz")
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
