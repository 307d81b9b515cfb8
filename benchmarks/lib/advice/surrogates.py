"""Recorded advice on the corpus' kernels, and surrogates that follow it, each fitted without a family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.lib.advice.table import recorded_advice
from benchmarks.lib.environment import ROOT
from benchmarks.lib.surrogates_without import surrogates_by_family
from forecast_autotune.llm.advice.record import Advice
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.advised import VERSION, AdviceWeights, advised_forecasts
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.learned import LearnedModel, LearnedSurrogate
from forecast_autotune.surrogates.protocol import Forecasts, Query, Surrogate
from forecast_train.splits import family_of

ADVICE_TABLE = ROOT / "benchmarks" / "data" / "advice.jsonl.gz"
"""Answers on every kernel: a line that says who wrote them and how, then one per answer."""


def advice_by_source(path: Path = ADVICE_TABLE, versions: Sequence[str] = ()) -> dict[str, Advice]:
    """Advice by source hash; several answers on one source as one record, the latest version's first.

    `versions`: only answers to these versions of the question.
    """
    return {a.source_sha256: a for a in recorded_advice(path, versions).values()}


class FollowingAdvice:
    """A surrogate that is told recorded advice with every question about a kernel that has some."""

    def __init__(
        self,
        base: AnalyticSurrogate,
        advice: Mapping[str, Advice],
        weights: AdviceWeights | None = None,
    ) -> None:
        """`weights`: None for those that ship."""
        self.base, self.advice, self.weights = base, dict(advice), weights
        self.name, self.version = "advised", f"{VERSION}-{base.version}"

    def forecast(self, query: Query) -> Forecasts:
        """Forecast all candidates of the query."""
        advice = self.advice.get(query.problem.kernel.source_sha256)
        return advised_forecasts(self.base, replace(query, advice=advice), self.weights)


class FamilyModels:
    """Learned surrogates in a folder, `<family>.npz` each, fitted without that family."""

    def __init__(
        self, folder: Path, families: Sequence[str], advice: Mapping[str, Advice] | None = None
    ) -> None:
        """With `advice`, what is found follows it."""
        self.folder, self.families, self.advice = folder, tuple(sorted(set(families))), advice

    def without(self, family: str) -> Surrogate:
        """The one that has not seen a family, fitted now if it is missing (half a minute).

        Raises `ValueError` for a file that was fitted with it.
        """
        surrogates_by_family([family], self.folder)
        model = LearnedModel.load(self.folder / f"{family}.npz")
        if (model.about or {}).get("without") != family:
            raise ValueError(f"{family}.npz was not fitted without {family}: give another folder")
        plain = LearnedSurrogate(model)
        return plain if self.advice is None else FollowingAdvice(plain, self.advice)

    def __call__(self, tables: Sequence[Table]) -> Surrogate:
        """The one for a fold that is trained on these tables: they hold all families but one."""
        left = set(self.families) - {family_of(t.problem) for t in tables}
        if len(left) != 1:
            raise ValueError(f"a fold leaves one family out, this leaves {sorted(left)}")
        return self.without(left.pop())
