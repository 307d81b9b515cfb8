"""A surrogate that follows advice: the cost function of a language model as one more mean of the process.

Its weight and its named constants are slopes of the Gaussian process: columns of (advice - belief) and of the
derivatives of the advice, so that measurements of the problem and of its relatives correct them in closed form.
How likely the advice belongs into the forecast at all is weighed against the belief without it (evidence, not
taste): where the clock disagrees, it is dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.llm.advice.language import CostFunction
from forecast_autotune.llm.advice.record import MATCH, SAME_PLACE, Advice
from forecast_autotune.llm.advice.subject import AdviceError
from forecast_autotune.surrogates.blend import (
    MovedSurrogate,
    disagreement,
    inclusion_probability,
    latest_moved,
    mix_forecasts,
)
from forecast_autotune.surrogates.covariance import Rows
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.prior import Prior
from forecast_autotune.surrogates.protocol import Array, Forecasts, Query

_VERSION = "advised-1"
_MOST_REMEMBERED = 64
"""Evaluations that are kept of one cost function: of a problem and its relatives."""
STEP = 0.25
"""Step of a constant, in doublings, for its derivative."""


_Identity = npt.NDArray[np.intp] | None


@dataclass(frozen=True)
class AdviceWeights:
    """How far advice is followed, fitted to recorded problems with each kernel's family left out."""

    mean: float = 0.28
    """Share of the way from the learned belief to the advice, before anything was measured."""
    sd: float = 0.32
    """Its uncertainty from kernel to kernel."""
    constants: float = 1.3
    """Factor on the stated spread of constants."""
    terms: float = 0.5
    """Doublings by which a labelled term may be off."""
    additive: float = 0.7
    """Share that the advice leaves of the process' own doubt about sums of one-dimensional effects ..."""
    joint: float = 0.95
    """... and about joint ones."""
    log_odds: float = 5.0
    """That advice belongs into the forecast, before anything was measured."""
    least: float = 0.05
    """Probability of that below which advice is dropped."""


_WITHOUT_IR = AdviceWeights(mean=0.9, sd=0.4)
"""Where the base has no IR to read, it believes in nothing else."""
_OF_PLACE = 0.5
"""Share of the weight that is left for advice on another release's kernel of the same name and meta-parameters.

Of 65 recorded lists of fla-core 0.6.0, by advice that was written for 0.5.2, decisions measure 0.2 to 0.3 configs less
(0.03 to 0.5) at regrets within chance, with 1 and with 4 compile workers.
"""


class AdvisedSurrogate(MovedSurrogate):
    """See the module. Made for one decision's questions: it remembers what is believed of relatives."""

    def __init__(
        self, base: AnalyticSurrogate, advice: Advice, informed: bool, weights: AdviceWeights | None = None
    ) -> None:
        """`informed`: whether `base` has IR to read. Raises `AdviceError` for advice that cannot be read."""
        self.weights = w = weights or _default_weights(advice, informed)
        self.advice, self.functions = advice, advice.functions
        each = w.sd * math.sqrt(len(self.functions))
        slopes = [each] * len(self.functions) + [1.0] * sum(map(_adjustable, self.functions))
        super().__init__(base, informed, slopes, w.additive, w.joint)
        self.name, self.version = "advised", f"{_VERSION}-{self.speaker.version}"
        self._moved_priors: dict[str, tuple[Prior, Prior]] = {}
        """By problem: the base's latest belief, and what became of it."""
        self._stated: dict[tuple[object, ...], tuple[Array, _Identity]] = {}
        """Forecasts of each cost function; they do not change as IR comes in."""

    def prior(self, query: Query) -> Prior:
        """The belief of the base, moved towards the advice. Raises `AdviceError` where it cannot be evaluated."""
        key, plain = query.problem.id, self.base.prior(query)
        last = self._moved_priors.get(key)
        if last is None or last[0] is not plain:
            last = self._moved_priors[key] = plain, self._advised_prior(query, plain)
        return last[1]

    def _advised_prior(self, query: Query, plain: Prior) -> Prior:
        n = len(query.candidates)
        rows = self.base.advised_rows(query)
        shifts, slopes = np.zeros((n, len(self.functions))), list[Array]()
        same = np.arange(n)
        foreign = query.problem.kernel.source_sha256 != self.advice.source_sha256
        for number, function in enumerate(self.functions):
            columns = np.zeros((n, 1 + _adjustable(function)))
            if len(rows) > 1 and not foreign:
                stated, identity = self._evaluated(query, rows, number)
                columns[rows] = self._columns(function, stated, plain.mean[rows])
                if identity is not None and number == 0:
                    same[rows] = rows[_first_of(identity)]
            shifts[:, number] = columns[:, 0] / len(self.functions)
            slopes.append(columns[:, 1:] / len(self.functions))
        columns = np.concatenate([shifts, *slopes], axis=1)
        moved = self.moved(plain, self.weights.mean * shifts.sum(axis=1), columns)
        return replace(moved, same_as=same)

    def _evaluated(self, query: Query, rows: Rows, number: int) -> tuple[Array, _Identity]:
        """A cost function as it is, then with each constant and term shifted by `STEP`: log2, [1 + shifts, rows]."""
        grids = tuple(query.grids.get(c) for c in query.candidates)
        key = query.problem.id, tuple(query.candidates), grids, number
        if key in self._stated:
            return self._stated[key]
        if len(self._stated) >= _MOST_REMEMBERED:
            self._stated.clear()
            self._moved_priors.clear()
        function, n = self.functions[number], len(rows)
        subject = self.base.advice_subject(query, rows)
        names = list(dict.fromkeys(function.labels))
        moves = np.eye(1 + _adjustable(function))[1:] * STEP
        shifts = {c.name: np.repeat(move, n) for c, move in zip(function.constants, moves, strict=False)}
        scales = {
            name: np.repeat(move, n)
            for name, move in zip(names, moves[len(function.constants) :], strict=True)
        }
        costs = function.evaluate(subject.repeated(1 + len(moves)), shifts, scales)
        identity = None if costs.identity is None else costs.identity[:n]
        self._stated[key] = costs.log2.reshape(1 + len(moves), n), identity
        return self._stated[key]

    def _columns(self, function: CostFunction, stated: Array, believed: Array) -> Array:
        """Disagreement with the belief, and what each constant and term may shift; [n, 1 + constants + terms]."""
        w, ones = self.weights, np.ones(len(believed))
        steps = [w.constants * math.log2(c.spread) for c in function.constants]
        steps += [w.terms] * (len(stated) - 1 - len(steps))
        results = [disagreement(believed, stated[0], ones, self.hyper)]
        for changed, step in zip(stated[1:], steps, strict=True):
            moved = disagreement(believed, changed, ones, self.hyper) - results[0]
            results.append(w.mean * moved / STEP * step)
        return np.stack(results, axis=1)


def advised_forecasts(
    base: AnalyticSurrogate, query: Query, weights: AdviceWeights | None = None
) -> Forecasts:
    """Forecasts that follow the query's advice as far as measurements bear it out."""
    advice = query.advice
    if advice is None:
        return base.forecast(query)
    query = replace(query, candidates=CandidateList.of(query.candidates))
    before = base.prior(query)
    try:
        advised = latest_moved(
            base,
            AdvisedSurrogate,
            (id(advice), before.informed, weights),
            lambda: AdvisedSurrogate(base, advice, before.informed, weights),
        )
        moved = advised.prior(query)
        share = inclusion_probability(query, advised, advised.speaker, advised.weights.log_odds)
        if share < advised.weights.least:
            return _noted(base.answer(query, before), "advice dropped: measurements contradict it")
        followed = advised.answer(query, moved)
    except AdviceError as error:
        return _noted(base.answer(query, before), f"advice does not apply: {error}")
    note = f"advice at weight {share * advised.weights.mean:.2f}"
    if origin := advice.origin:
        note += f" ({origin})"
    if share > 1.0 - advised.weights.least:
        return _noted(followed, note)
    return _noted(mix_forecasts(followed, base.answer(query, before), share), note)


def _noted(forecasts: Forecasts, note: str) -> Forecasts:
    return replace(forecasts, reason=f"{forecasts.reason}; {note}", advice=note)


def _default_weights(advice: Advice, informed: bool) -> AdviceWeights:
    weights = AdviceWeights() if informed else _WITHOUT_IR
    if advice.extra.get(MATCH) == SAME_PLACE:
        weights = replace(weights, mean=_OF_PLACE * weights.mean, log_odds=_OF_PLACE * weights.log_odds)
    return weights


def _adjustable(function: CostFunction) -> int:
    """How many constants and terms measurements may correct."""
    return len(function.constants) + len(set(function.labels))


def _first_of(identity: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """The first row of each row's class."""
    first = np.unique(identity, return_index=True)[1]
    return np.asarray(first[np.unique(identity, return_inverse=True)[1]])
