"""Judgements of sources in the process: each source's configs move together, as far as it was judged.

A surrogate that reads IR knows configs of one source well and tells sources apart badly; a reader of sources does the
opposite. So what is believed of a judged source's level is a mean of both, whose error is an offset of its own,
shared by its configs: a column of the Gaussian process per source, which measurements correct in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from forecast_autotune.features.candidate_list import CandidateList, Codes
from forecast_autotune.records import is_base_variant
from forecast_autotune.surrogates.blend import MovedSurrogate, latest_moved
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.prior import Prior
from forecast_autotune.surrogates.protocol import Array, Forecasts, Query
from forecast_autotune.variants.records import SourceJudgement


@dataclass(frozen=True)
class JudgementWeights:
    """How far judgements of sources are followed; fitted to recorded sources of all kernels."""

    learned: float = 0.19
    """Share of the learned difference between a source's best config and the base's that stays."""
    judged: float = 0.62
    """Share of the judged difference that is believed besides."""
    stated: float = 0.3
    """Spread (log2) of a source's offset, per stated standard deviation ..."""
    disagreement: float = 0.1
    """... and per log2 by which both differ."""
    common: float = 0.1
    """Spread of what judgements of one kernel's sources are off by in common."""
    most: float = 1.5
    """Differences (log2) beyond this are not told apart."""


class JudgedSurrogate(MovedSurrogate):
    """See the module. Made for one decision's questions."""

    def __init__(
        self,
        base: AnalyticSurrogate,
        judgements: Mapping[str, SourceJudgement],
        informed: bool,
        weights: JudgementWeights | None = None,
    ) -> None:
        """`judgements` by variant; `informed`: whether `base` has IR to read."""
        super().__init__(base, informed, [1.0] * (1 + len(judgements)))
        self.weights = weights or JudgementWeights()
        self.variants, self.judgements = tuple(sorted(judgements)), dict(judgements)
        self._offsets: dict[str, tuple[float, float]] = {}
        """By judged variant: what its configs are moved by, and the spread of the rest; of the decision's problem."""
        self._last: tuple[Prior, Prior] | None = None

    def prior(self, query: Query) -> Prior:
        """The belief of the base, each judged source moved as a whole."""
        plain = self.base.prior(query)
        if self._last is not None and self._last[0] is plain:
            return self._last[1]
        self._last = plain, self._judged_prior(query, plain)
        return self._last[1]

    def _judged_prior(self, query: Query, plain: Prior) -> Prior:
        column = CandidateList.of(query.candidates).columns["variant"]
        believed = self.hyper.compress(plain.mean, float(plain.mean.min()))
        if not self._offsets:
            self._offsets = self._offsets_of(column.values, column.codes, believed)
        shifts = np.zeros(len(column.values))
        columns = np.zeros((len(column.values), 1 + len(self.variants)))
        for code, variant in enumerate(column.values):
            if variant in self._offsets:
                shifts[code], spread = self._offsets[variant]
                columns[code, 0] = self.weights.common
                columns[code, 1 + self.variants.index(variant)] = spread
        shift = shifts[column.codes]
        return self.moved(plain, shift, columns[column.codes], floor=float((believed + shift).min()))

    def _offsets_of(
        self, variants: tuple[str, ...], codes: Codes, believed: Array
    ) -> dict[str, tuple[float, float]]:
        level = {v: float(believed[codes == code].min()) for code, v in enumerate(variants)}
        base = min((s for v, s in level.items() if is_base_variant(v)), default=math.nan)
        if not math.isfinite(base):
            return {}
        w, result = self.weights, {}
        for variant in self.variants:
            if variant not in level:
                continue
            judgement = self.judgements[variant]
            learned = min(w.most, max(-w.most, level[variant] - base))
            judged = min(w.most, max(-w.most, judgement.log2_ratio))
            wanted = w.learned * learned + w.judged * judged
            spread = math.hypot(w.stated * judgement.sd, w.disagreement * (learned - judged))
            result[variant] = wanted - (level[variant] - base), spread
        return result


def judged_forecasts(
    base: AnalyticSurrogate, query: Query, weights: JudgementWeights | None = None
) -> Forecasts:
    """Forecasts that follow the query's judgements of sources as far as measurements bear them out."""
    query = replace(query, candidates=CandidateList.of(query.candidates))
    listed = CandidateList.of(query.candidates).columns["variant"].values
    relevant = {name: query.judgements[name] for name in listed if name in query.judgements}
    before = base.prior(query)
    if not relevant:
        return base.answer(query, before)
    surrogate = latest_moved(
        base,
        JudgedSurrogate,
        (before.informed, relevant, weights),
        lambda: JudgedSurrogate(base, relevant, before.informed, weights),
    )
    result = surrogate.answer(query, surrogate.prior(query))
    return replace(result, reason=f"{result.reason}; {len(relevant)} sources judged")
