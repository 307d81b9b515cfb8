"""A surrogate that follows advice: the cost function of a language model as one more mean of the process.

Its weight and its named constants are slopes of the Gaussian process: columns of (advice - belief) and of the
derivatives of the advice, so that measurements of the problem and of its relatives correct them in closed form.
Model comparison with the belief without the advice tells whether it belongs into the forecast at all: where the
clock disagrees, it is dropped.
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
"""Most evaluations in a surrogate's cache: one each for a problem and its relatives, and cost function."""
STEP = 0.25
"""Step of a constant, in doublings, for its derivative."""


_Identity = npt.NDArray[np.intp] | None


@dataclass(frozen=True)
class AdviceWeights:
    """The weights of advice in a forecast, fitted to recorded problems with each kernel's family left out."""

    mean: float = 0.28
    """Share of the way from the learned belief to the advice, before any measurement."""
    sd: float = 0.32
    """Standard deviation of `mean` from kernel to kernel."""
    constants: float = 1.3
    """Factor on the stated spread of constants."""
    terms: float = 0.5
    """Doublings by which a labelled term may be off."""
    additive: float = 0.7
    """Share that the advice leaves of the process' own doubt about sums of one-dimensional effects ..."""
    joint: float = 0.95
    """... and about joint ones."""
    log_odds: float = 5.0
    """Log odds that advice belongs into the forecast, before any measurement."""
    least: float = 0.05
    """Probability that it belongs there, below which advice is dropped."""


_WITHOUT_IR = AdviceWeights(mean=0.9, sd=0.4)
"""Weights where the base has no IR to read: its own belief is weak then."""
_PLACE_SHARE = 0.5
"""Share of the weight that remains for advice on another release's kernel of the same name and meta-parameters.

On 65 recorded lists of fla-core 0.6.0, with advice written for 0.5.2, decisions measure 0.2 to 0.3 configs less
(0.03 to 0.5) at regrets within chance, with 1 and with 4 compile workers.
"""


class AdvisedSurrogate(MovedSurrogate):
    """See the module. Made for one decision's queries: it caches the priors of relatives."""

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
        """By problem: the base's latest prior, and the same moved towards the advice."""
        self._evaluations: dict[tuple[object, ...], tuple[Array, _Identity]] = {}
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
                log2_ms, identity = self._evaluate(query, rows, number)
                columns[rows] = self._columns(function, log2_ms, plain.mean[rows])
                if identity is not None and number == 0:
                    same[rows] = rows[_first_of(identity)]
            shifts[:, number] = columns[:, 0] / len(self.functions)
            slopes.append(columns[:, 1:] / len(self.functions))
        columns = np.concatenate([shifts, *slopes], axis=1)
        prior = self.moved(plain, self.weights.mean * shifts.sum(axis=1), columns)
        return replace(prior, same_as=same)

    def _evaluate(self, query: Query, rows: Rows, number: int) -> tuple[Array, _Identity]:
        """A cost function itself, then with each constant and term shifted by `STEP`: log2, [1 + shifts, rows]."""
        grids = tuple(query.grids.get(c) for c in query.candidates)
        key = query.problem.id, tuple(query.candidates), grids, number
        if key in self._evaluations:
            return self._evaluations[key]
        if len(self._evaluations) >= _MOST_REMEMBERED:
            self._evaluations.clear()
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
        self._evaluations[key] = costs.log2.reshape(1 + len(moves), n), identity
        return self._evaluations[key]

    def _columns(self, function: CostFunction, log2_ms: Array, prior_mean: Array) -> Array:
        """Disagreement with the prior, and the effect of each constant and term; [n, 1 + constants + terms]."""
        w, trust = self.weights, np.ones(len(prior_mean))
        steps = [w.constants * math.log2(c.spread) for c in function.constants]
        steps += [w.terms] * (len(log2_ms) - 1 - len(steps))
        results = [disagreement(prior_mean, log2_ms[0], trust, self.hyper)]
        for variation, step in zip(log2_ms[1:], steps, strict=True):
            effect = disagreement(prior_mean, variation, trust, self.hyper) - results[0]
            results.append(w.mean * effect / STEP * step)
        return np.stack(results, axis=1)


def advised_forecasts(
    base: AnalyticSurrogate, query: Query, weights: AdviceWeights | None = None
) -> Forecasts:
    """Forecasts that follow the query's advice as far as measurements confirm it."""
    advice = query.advice
    if advice is None:
        return base.forecast(query)
    query = replace(query, candidates=CandidateList.of(query.candidates))
    before = base.prior(query)
    try:
        surrogate = latest_moved(
            base,
            AdvisedSurrogate,
            (id(advice), before.informed, weights),
            lambda: AdvisedSurrogate(base, advice, before.informed, weights),
        )
        prior = surrogate.prior(query)
        share = inclusion_probability(query, surrogate, surrogate.speaker, surrogate.weights.log_odds)
        if share < surrogate.weights.least:
            return _noted(base.answer(query, before), "advice dropped: measurements contradict it")
        forecasts = surrogate.answer(query, prior)
    except AdviceError as error:
        return _noted(base.answer(query, before), f"advice does not apply: {error}")
    note = f"advice at weight {share * surrogate.weights.mean:.2f}"
    if origin := advice.origin:
        note += f" ({origin})"
    if share > 1.0 - surrogate.weights.least:
        return _noted(forecasts, note)
    return _noted(mix_forecasts(forecasts, base.answer(query, before), share), note)


def _noted(forecasts: Forecasts, note: str) -> Forecasts:
    return replace(forecasts, reason=f"{forecasts.reason}; {note}", advice=note)


def _default_weights(advice: Advice, informed: bool) -> AdviceWeights:
    weights = AdviceWeights() if informed else _WITHOUT_IR
    if advice.extra.get(MATCH) == SAME_PLACE:
        weights = replace(weights, mean=_PLACE_SHARE * weights.mean, log_odds=_PLACE_SHARE * weights.log_odds)
    return weights


def _adjustable(function: CostFunction) -> int:
    """How many constants and terms measurements may correct."""
    return len(function.constants) + len(set(function.labels))


def _first_of(identity: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """The first row of each row's class."""
    first = np.unique(identity, return_index=True)[1]
    return np.asarray(first[np.unique(identity, return_inverse=True)[1]])
