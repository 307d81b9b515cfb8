"""A language model's belief inside the learned surrogate's: its weight, and its end. Pure functions, no clock.

A model's forecasts and its advice enter in the same way: they move the prior mean, and their weight is a slope of the
Gaussian process, which measurements correct.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from forecast_autotune.records import Candidate
from forecast_autotune.surrogates.covariance import Hyperparameters
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.learned import LearnedSurrogate
from forecast_autotune.surrogates.prior import Prior
from forecast_autotune.surrogates.protocol import Array, Forecasts, Query

if TYPE_CHECKING:
    from forecast_autotune.llm.calibration import BlendWeight  # 10 ms of a first key, for its type alone

Rows = npt.NDArray[np.intp]

PRIOR_LOG_ODDS = 0.7
"""Log odds, before any measurement, that the model's part belongs into the forecast at all: 2 to 1."""


class MovedSurrogate(AnalyticSurrogate):
    """An analytic surrogate whose prior mean is moved, with a slope for each move."""

    def __init__(
        self,
        base: AnalyticSurrogate,
        informed: bool,
        slopes: Sequence[float],
        additive: float = 1.0,
        joint: float = 1.0,
    ) -> None:
        """`informed`: whether `base` has IR to read. `slopes` are standard deviations of the columns of `moved`;
        `additive` and `joint` are the remaining shares of the process' own doubt about these effects."""
        # Without IR the forest has nothing to read and its hyperparameters mislead: see `LearnedSurrogate.answer`.
        speaker = base if informed or not isinstance(base, LearnedSurrogate) else AnalyticSurrogate()
        h = speaker.hyper
        parts = (*h.part_slopes, *slopes)
        hyper = replace(h, part_slopes=parts, additive=additive * h.additive, joint=joint * h.joint)
        super().__init__(hyper, relatives=base.relatives, rows=base.rows)
        self.base, self.informed, self.speaker = base, informed, speaker
        self.name, self.version, self.trees = speaker.name, speaker.version, speaker.trees

    def moved(self, plain: Prior, shift: Array, columns: Array) -> Prior:
        """`plain`, its compressed mean moved by `shift` [n], with `columns` [n, slopes] that slopes multiply."""
        least = float(plain.mean.min())
        bent = self.hyper.compress(plain.mean, least) + shift
        parts = np.concatenate([plain.parts, columns], axis=1)
        leaves = plain.leaves if self.trees else None
        return replace(plain, mean=self.hyper.expand(bent, least), parts=parts, leaves=leaves)


Moved = TypeVar("Moved", bound=MovedSurrogate)


def latest_moved(
    base: AnalyticSurrogate, kind: type[Moved], about: tuple[object, ...], make: Callable[[], Moved]
) -> Moved:
    """The cached surrogate of `base` if its `about` is the same, else a new one: a decision has many queries."""
    entry = _LATEST.get(base)
    if entry is None or type(entry[1]) is not kind or entry[0] != about:
        entry = _LATEST[base] = about, make()
    assert isinstance(entry[1], kind)
    return entry[1]


_LATEST: WeakKeyDictionary[AnalyticSurrogate, tuple[tuple[object, ...], MovedSurrogate]] = WeakKeyDictionary()


class BlendedSurrogate(MovedSurrogate):
    """A surrogate that follows a language model's forecasts of some candidates.

    Made for one forecast: it caches the priors of relatives.
    """

    def __init__(
        self,
        base: AnalyticSurrogate,
        informed: bool,
        disagreements: Mapping[Candidate, float],
        weight: BlendWeight,
    ) -> None:
        """`disagreements` of the model with `base`, log2, by candidate; see `disagreement`."""
        super().__init__(base, informed, [weight.sd])
        self.disagreements, self.weight = disagreements, weight
        self._base_priors: dict[tuple[str, tuple[Candidate, ...]], Prior] = {}

    def without_llm(self) -> BlendedSurrogate:
        """The same surrogate with a weight of zero for the model."""
        plain = BlendedSurrogate(self.base, self.informed, self.disagreements, type(self.weight)())
        plain._base_priors = self._base_priors  # the same for both
        return plain

    def prior(self, query: Query) -> Prior:
        """The prior of `base`, moved; a relative's as well, as residuals must refer to the same belief."""
        key = query.problem.id, tuple(query.candidates)
        if key not in self._base_priors:
            self._base_priors[key] = self.base.prior(query)
        column = np.array([self.disagreements.get(c, 0.0) for c in query.candidates])
        return self.moved(self._base_priors[key], self.weight.mean * column, column[:, None])


def disagreement(learned: Array, stated: Array, trust: Array, hyper: Hyperparameters) -> Array:
    """How much slower than the learned forecast a model expects each candidate to be, log2, [n].

    `learned` and `stated` [n] are log2 milliseconds, `trust` [n] is 0 where the model said nothing. Slow ends
    are compressed as in the process; levels are aligned at the fast end, as neither knows the problem's.
    """
    has_answer = trust > 0
    if not has_answer.any():
        return np.zeros(len(trust))
    own = hyper.compress(learned, float(learned.min())) - float(learned.min())
    floor = float(stated[has_answer].min())
    theirs = hyper.compress(stated, floor) - floor
    # Candidates that both forecast to be slow get little weight: they decide nothing.
    weight = trust * 2.0 ** -(own + theirs)
    gap = theirs - own
    return np.where(has_answer, trust * (gap - float(weight @ gap) / float(weight.sum())), 0.0)


def inclusion_probability(
    query: Query, blend: AnalyticSurrogate, without: AnalyticSurrogate, log_odds: float = PRIOR_LOG_ODDS
) -> float:
    """P(the model's part belongs into the forecast) after the query's measurements; `log_odds` is that before them.

    Bayesian model comparison with the belief without the model (Kass & Raftery 1995). The slope term alone
    would only ever shrink the weight of a model that is plainly wrong here.
    """

    def gain(data: Query) -> float:
        return blend.log_likelihood(data, blend.prior(data)) - without.log_likelihood(
            data, without.prior(data)
        )

    odds = log_odds
    if query.measured:
        # How well relatives are explained is no evidence: the model was shown some of them.
        odds += gain(query) - (gain(replace(query, measured=())) if query.relatives else 0.0)
    return 1.0 / (1.0 + math.exp(-min(max(odds, -30.0), 30.0)))


def mix_forecasts(first: Forecasts, second: Forecasts, share: float) -> Forecasts:
    """Both forecasts of the same candidates, the first with probability `share` (model averaging).

    A draw comes from one of them as a whole, so what is measured next hedges between the two.
    """

    def sample(rows: Rows, count: int, generator: np.random.Generator) -> Array:
        is_first = generator.random(count) < share
        seeds = generator.integers(2**31, size=2)
        a, b = (f.samples(rows, count, int(s)) for f, s in zip((first, second), seeds, strict=True))
        return np.where(is_first[:, None], a, b)

    mean = share * first.mean + (1.0 - share) * second.mean
    apart = share * (1.0 - share) * (first.mean - second.mean) ** 2
    return replace(
        first,
        mean=mean,
        sd=np.sqrt(share * first.sd**2 + (1.0 - share) * second.sd**2 + apart),
        p_fail=share * first.p_fail + (1.0 - share) * second.p_fail,
        sampler=sample,
        lower_bound=np.minimum(first.optimistic(), second.optimistic()),
    )
