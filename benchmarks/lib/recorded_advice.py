"""Recorded advice on the corpus' kernels, surrogates fitted without a family, and what following it changes."""

from __future__ import annotations

import gzip
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.lib.environment import ROOT
from benchmarks.lib.result_files import say
from forecast_autotune.llm.advice.record import Advice
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.advised import AdviceWeights, advised_forecasts
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.learned import LearnedModel, LearnedSurrogate, shipped_model
from forecast_autotune.surrogates.protocol import Forecasts, Query, Surrogate
from forecast_autotune.tuning.replays.replay import load, replay_one, shipped_tables
from forecast_train.splits import family_of, make_folds
from forecast_train.surrogate.fit import fit_model

DATA = ROOT / "benchmarks" / "data"
ADVICE_TABLE = DATA / "advice.jsonl.gz"
"""Answers on every kernel: a line that says who wrote them and how, then one per answer."""
FITTED_TABLES = (*shipped_tables(), DATA / "corpus_h200.jsonl.xz", DATA / "corpus_h200_2.jsonl.xz")
"""Tables that surrogates are fitted to."""
_AS_SHIPPED = "nothing: as shipped"
_DRAWS = 1000


def advice_by_source(path: Path = ADVICE_TABLE) -> dict[str, Advice]:
    """Advice by source hash; several answers on one source as one record, the latest version's first."""
    answers: dict[str, list[Advice]] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if row["type"] == "advice":
                advice = Advice.from_json(row)
                answers.setdefault(advice.source_sha256, []).append(advice)
    joined = {}
    for source, given in answers.items():
        first, *others = sorted(given, key=lambda a: a.version, reverse=True)
        joined[source] = replace(first, others=tuple(a.text for a in others))
    return joined


class FollowingAdvice:
    """A surrogate that is told recorded advice with every question about a kernel that has some."""

    def __init__(
        self, base: AnalyticSurrogate, advice: Mapping[str, Advice], weights: AdviceWeights | None = None
    ) -> None:
        """`weights`: None for those that ship."""
        self.base, self.advice, self.weights = base, dict(advice), weights
        self.name, self.version = "advised", f"advised-1-{base.version}"

    def forecast(self, query: Query) -> Forecasts:
        """Forecast all candidates of the query."""
        advice = self.advice.get(query.problem.kernel.source_sha256)
        return advised_forecasts(self.base, replace(query, advice=advice), self.weights)


class FamilyModels:
    """Learned surrogates in a folder, `<family>.npz` each, fitted without that family."""

    def __init__(
        self, folder: Path, families: Sequence[str], advice: Mapping[str, Advice] | None = None
    ) -> None:
        """With `advice`, they follow it."""
        self.folder, self.families, self.advice = folder, tuple(sorted(set(families))), advice

    def without(self, family: str) -> Surrogate:
        """The one that has not seen a family, fitted now if it is missing (half a minute).

        Raises `ValueError` for a file that was fitted with it.
        """
        path = self.folder / f"{family}.npz"
        if not path.is_file():
            self._fit(family, path)
        model = LearnedModel.load(path)
        # No recorded table is of some families: then the shipped surrogate has not seen them either.
        if (model.about or {}).get("without") not in (family, _AS_SHIPPED):
            raise ValueError(f"{path.name} was not fitted without {family}: give another folder")
        plain = LearnedSurrogate(model)
        return plain if self.advice is None else FollowingAdvice(plain, self.advice)

    def _fit(self, family: str, path: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        begin = time.perf_counter()
        folds = {fold.name: fold for fold in make_folds(load(FITTED_TABLES), "family")}
        model = fit_model(list(folds[family].train)) if family in folds else shipped_model()
        if model is None:
            raise ValueError("this package ships no model: fit one with `forecast-autotune train surrogate`")
        without = family if family in folds else _AS_SHIPPED
        replace(model, about={**(model.about or {}), "without": without}).save(path)
        say(f"fitted without {family} in {time.perf_counter() - begin:.0f} s")

    def __call__(self, tables: Sequence[Table]) -> Surrogate:
        """The one for a fold that is trained on these tables: they hold all families but one."""
        left = set(self.families) - {family_of(t.problem) for t in tables}
        if len(left) != 1:
            raise ValueError(f"a fold leaves one family out, this leaves {sorted(left)}")
        return self.without(left.pop())


def decision_figures(table: Table, arm: Surrogate, settings: Settings, workers: int = 16) -> dict[str, Any]:
    """The default policy's decision in a replay."""
    row, _ = replay_one(table, surrogate=arm, policy=None, settings=settings, workers=workers)
    path = row.path or (row.regret,)
    return {
        "regret": row.regret,
        "measured": row.measured,
        "candidates": row.candidates,
        "stated_risk": row.stated_risk,
        "missed": float(row.regret > settings.tolerance + 1e-9),
        "seconds": row.tune_s,
        **{f"after_{count}": path[min(count, len(path)) - 1] for count in (1, 3, 5)},
    }


RATIOS = ("regret", "after_1", "after_3", "after_5")
"""Figures whose means are geometric."""


def paired_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By arm: the mean over kernels of each figure, and its difference to `learned` on the same problems.

    Regrets are geometric means, as shares. Differences come with their 95 % interval over kernels.
    """
    learned = {r["problem"]: r for r in rows if r["arm"] == "learned"}
    figures: dict[str, Any] = {}
    for arm in dict.fromkeys(r["arm"] for r in rows):
        mine = [r for r in rows if r["arm"] == arm and r["problem"] in learned]
        shown: dict[str, Any] = {"problems": len(mine), "kernels": len({r["kernel"] for r in mine})}
        for name in (*RATIOS, "measured", "missed", "stated_risk", "seconds"):
            if not mine or name not in mine[0]:
                continue
            scale, unscale = (math.log1p, math.expm1) if name in RATIOS else (float, float)
            values = _by_kernel(mine, [scale(r[name]) for r in mine])
            rivals = _by_kernel(mine, [scale(learned[r["problem"]][name]) for r in mine])
            shown[name] = round(unscale(float(values.mean())), 5)
            if arm != "learned":
                shown[f"{name}_learned"] = round(unscale(float(rivals.mean())), 5)
                shown[f"{name}_difference"] = interval(values - rivals)
        figures[arm] = shown
    return figures


def interval(differences: npt.NDArray[np.float64], seed: int = 0) -> dict[str, float]:
    """Mean and its 95 % bootstrap interval, one entry per kernel."""
    generator = np.random.default_rng(seed)
    drawn = differences[generator.integers(len(differences), size=(_DRAWS, len(differences)))].mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    figures = {"value": differences.mean(), "low": low, "high": high}
    return {name: round(float(value), 5) for name, value in figures.items()}


def _by_kernel(rows: Sequence[Mapping[str, Any]], values: Sequence[float]) -> npt.NDArray[np.float64]:
    by: dict[str, list[float]] = {}
    for row, value in zip(rows, values, strict=True):
        by.setdefault(row["kernel"], []).append(value)
    return np.array([float(np.mean(by[k])) for k in sorted(by)])
