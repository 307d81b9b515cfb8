"""The question to a surrogate (`Query`) and its answer (`Forecasts`).

A surrogate sees no store and no clock: the query holds everything that the tuner knows. It must be a
pure function of the query, so that ranks of a distributed job agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from forecast_autotune.numerics import INTERVAL_LEVELS
from forecast_autotune.records import Candidate, LLMConsultation, Measurement, Problem
from forecast_autotune.records.table import latest_labels

if TYPE_CHECKING:
    from forecast_autotune.llm.advice.record import Advice

Array = npt.NDArray[np.float64]

QUANTILE_LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Probability levels of the quantiles in a `Forecast`."""
_Z = np.array([-1.6448536269514722, -0.6744897501960817, 0.0, 0.6744897501960817, 1.6448536269514722])
_MAX_JOINT_CANDIDATES = 512
"""Most candidates that are drawn jointly for `Forecasts.p_within`."""
_INTERVAL_OF_QUANTILE = (0.9, 0.5, 0.5, 0.5, 0.9)
"""The central interval that each of `QUANTILE_LEVELS` is an end of."""


@dataclass(frozen=True)
class Relative:
    """Measurements of the same kernel elsewhere: another shape, dtype, toolchain or source."""

    problem: Problem
    measurements: Sequence[Measurement]

    @property
    def labels(self) -> dict[Candidate, Measurement]:
        """The latest label of each candidate (`latest_labels`)."""
        return latest_labels(self.measurements)


@dataclass(frozen=True)
class Query:
    """One question to a surrogate: how fast would these candidates of this problem run?"""

    problem: Problem
    candidates: Sequence[Candidate]
    grids: Mapping[Candidate, tuple[int, ...]] = field(default_factory=dict)
    """Launch grid per candidate, where it is known."""
    measured: Sequence[Measurement] = ()
    """This problem's own measurements so far, failures included."""
    relatives: Sequence[Relative] = ()
    ttir: Mapping[str, str] = field(default_factory=dict)
    """TTIR by `features.ttir.extraction.assignment_key`; may be empty or partial."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Source by variant, where it is known; the base kernel's is the problem's own."""
    advice: Advice | None = None
    """The advice of a language model on the kernel's source, if there is any."""
    provisional: bool = False
    """Whether the forecasts only choose the first compilations: a query with IR follows at once."""
    once: bool = False
    """Whether nothing will be measured, so that no later query follows: a slow answer is worth waiting for."""


_CHOSEN_SLOPE, _CHOSEN_ODDS, _ODDS_PER_DOUBLING, _PROVEN_ODDS = 0.42, 0.4, 0.47, 1.2
"""The best of many forecasts is the luckiest as well: log odds of its risk from those of any candidate, less a term for
each doubling of the tolerance beyond 2 %, and one where it has won at the nearest problem that was tuned. Fitted to 352
decisions by surrogates that had not seen their families (`benchmarks.forecasting.calibration --untimed --fit`);
the last lies between the fit (1.4) and libraries (0.9)."""
_LEAST_RISK = 0.002
"""A share of 512 draws is never nearer to certainty than this."""


@dataclass(frozen=True)
class Forecast:
    """The predictive distribution of one candidate: log2 milliseconds, and failure."""

    candidate: Candidate
    quantiles: tuple[float, ...]
    """Quantiles of log2(milliseconds), given that it runs, at `QUANTILE_LEVELS`."""
    p_fail: float

    @property
    def point(self) -> float:
        """Median of log2(milliseconds)."""
        return self.quantiles[len(QUANTILE_LEVELS) // 2]

    @property
    def spread(self) -> float:
        """Standard deviation of log2(milliseconds) that a normal with this central 90 % would have."""
        return (self.quantiles[4] - self.quantiles[0]) / (2 * float(_Z[4]))


def _no_annotation(row: int) -> Mapping[str, object]:
    return {}


@dataclass(frozen=True)
class Forecasts:
    """Forecasts of many candidates at once, with their dependence.

    Arrays have shape [n], one entry per candidate: `mean` and `sd` of log2(milliseconds) given that
    the candidate runs, and `p_fail` in [0, 1]. `draw(k, seed)` gives joint samples [k, n] of
    log2(milliseconds); the default draws independently.
    """

    candidates: Sequence[Candidate]
    mean: Array
    sd: Array
    p_fail: Array
    sampler: Callable[[npt.NDArray[np.intp], int, np.random.Generator], Array] | None = None
    """Joint samples [k, len(rows)] for the given rows; None means independent."""
    reason: str = ""
    """Why the surrogate is as sure as it is, or why it abstains; shown to users."""
    lower_bound: Array | None = None
    """Optimistic bound of log2(milliseconds), about two standard deviations down; None: `mean - 2 sd`."""
    weigh_risk: Callable[[float], float] = float
    """Stated risk -> weighed with other evidence of the surrogate on this problem. Comes before `calibrate_risk`,
    which is fitted to its results, and is no part of a calibration."""
    calibrate_risk: Callable[[float], float] = float
    """Stated risk -> how often it came true on recorded problems; the identity by default."""
    calibrate_untimed: Callable[[float], float] = float
    """The same for `untimed_risk`, by the verdicts of a store."""
    proven: int | None = None
    """Row of the fastest at the nearest problem of this kernel that was tuned on the same device, if one was."""
    calibrate_within: Callable[[Array], Array] | None = None
    """The same for `p_within`; None changes nothing."""
    interval_factors: tuple[float, ...] = (1.0,) * len(INTERVAL_LEVELS)
    """Factors on the half-widths of a normal's central intervals, per level of `INTERVAL_LEVELS`."""
    consultation: LLMConsultation | None = None
    """The part of the language model in the settings, asked or not; None where they name none."""
    without_llm: Forecasts | None = None
    """The forecasts without the model's answer, where one was heard: planning with both shows its effect."""
    group: str = ""
    """The group of problems whose calibration was applied; "" where none was."""
    advice: str = ""
    """The fate of a language model's advice on the kernel: followed, dropped, not applicable; "" without any."""
    note: Callable[[int], Mapping[str, object]] = _no_annotation
    """Notes to record with a row's measurement besides the forecast itself: JSON, to learn from later."""
    _last_outcomes: dict[tuple[bytes, int, int], Array] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """The last results of `sampled_outcomes`, by its arguments."""

    def __len__(self) -> int:
        return len(self.candidates)

    def __getitem__(self, index: int) -> Forecast:
        stretch = np.interp(_INTERVAL_OF_QUANTILE, INTERVAL_LEVELS, self.interval_factors)
        quantiles = self.mean[index] + self.sd[index] * _Z * stretch
        return Forecast(self.candidates[index], tuple(float(q) for q in quantiles), float(self.p_fail[index]))

    def interval(self, level: float) -> tuple[Array, Array]:
        """Ends of the calibrated central intervals of log2(milliseconds), shape [n] each.

        `level` is the nominal coverage, in (0, 1). Raises `ValueError` outside of it.
        """
        from statistics import NormalDist  # which a tuning run does not need

        if not 0.0 < level < 1.0:
            raise ValueError(f"an interval's level lies between 0 and 1, got {level}: 0.9 is 90 %")
        width = NormalDist().inv_cdf(0.5 + level / 2) * float(
            np.interp(level, INTERVAL_LEVELS, self.interval_factors)
        )
        return self.mean - width * self.sd, self.mean + width * self.sd

    def uncalibrated(self) -> Forecasts:
        """The same forecasts without any calibration, to fit one."""
        plain = (1.0,) * len(INTERVAL_LEVELS)
        return replace(self, calibrate_risk=float, calibrate_within=None, interval_factors=plain)

    def optimistic(self) -> Array:
        """The optimistic bound per candidate, shape [n]."""
        return self.lower_bound if self.lower_bound is not None else np.asarray(self.mean - 2 * self.sd)

    def samples(self, rows: npt.NDArray[np.intp], count: int, seed: int = 0) -> Array:
        """Joint samples [count, len(rows)] of log2(milliseconds), the same for the same seed."""
        generator = np.random.default_rng(seed)
        if self.sampler is not None:
            return self.sampler(rows, count, generator)
        noise = generator.standard_normal((count, len(rows)))
        return np.asarray(self.mean[rows] + self.sd[rows] * noise)

    def sampled_outcomes(self, rows: npt.NDArray[np.intp], count: int, seed: int = 0) -> Array:
        """`samples` with infinity where a candidate fails; read-only.

        The latest result is cached: plans are made again and again on the same forecasts.
        """
        key = rows.tobytes(), count, seed
        result = self._last_outcomes.get(key)
        if result is None:
            result = self._draw_outcomes(rows, count, seed)
            result.flags.writeable = False
            self._last_outcomes.clear()
            self._last_outcomes[key] = result
        return result

    def _draw_outcomes(self, rows: npt.NDArray[np.intp], count: int, seed: int) -> Array:
        draws = self.samples(rows, count, seed)
        is_failure = np.random.default_rng(seed + 1).random(draws.shape) < self.p_fail[rows]
        return np.where(is_failure, np.inf, draws)

    def p_within(self, tolerance: float, count: int = 512, seed: int = 0) -> Array:
        """P(time <= (1 + tolerance) x the fastest of these candidates) per candidate, shape [n].

        The share of joint draws, passed through `calibrate_within`. Beyond `_MAX_JOINT_CANDIDATES` candidates only the
        most promising are drawn, as the cost grows with the cube: the share of the others is 0.
        """
        rows = np.sort(np.argsort(self.optimistic(), kind="stable")[:_MAX_JOINT_CANDIDATES])
        draws = self._draw_outcomes(rows, count, seed)
        limit = draws.min(axis=1, keepdims=True) + math.log2(1 + tolerance)
        share = np.zeros(len(self))
        share[rows] = ((draws <= limit) & np.isfinite(draws)).mean(axis=0)
        return share if self.calibrate_within is None else self.calibrate_within(share)

    def untimed_risk(self, row: int, tolerance: float, seed: int = 0) -> float:
        """P(a candidate that is chosen as the best forecast is slower than the best by more than the tolerance)."""
        risk = min(max(1.0 - float(self.p_within(tolerance, seed=seed)[row]), _LEAST_RISK), 1.0 - _LEAST_RISK)
        doublings = math.log2(min(max(tolerance, 0.005), 0.2) / 0.02)
        odds = _CHOSEN_SLOPE * math.log(risk / (1.0 - risk)) + _CHOSEN_ODDS - _ODDS_PER_DOUBLING * doublings
        odds -= _PROVEN_ODDS if row == self.proven else 0.0
        return self.calibrate_untimed(1.0 / (1.0 + math.exp(-odds)))

    def order(self) -> npt.NDArray[np.intp]:
        """Row numbers from best to worst: expected time, with the probability of failing as a penalty.

        A failure is charged as a slowdown of 2^6, so a candidate that surely fails comes last.
        """
        return np.argsort(self.mean + 6.0 * self.p_fail, kind="stable")


@runtime_checkable
class Surrogate(Protocol):
    """Anything that forecasts without running the candidate."""

    name: str
    version: str

    def forecast(self, query: Query) -> Forecasts:
        """Forecast every candidate of the query, in its order.

        Must not raise for odd problems: where nothing can be said, it answers with a wide `sd`.
        """
        ...


@runtime_checkable
class FileBackedSurrogate(Protocol):
    """A surrogate that reads files at its first forecast, and can do so earlier."""

    def load(self) -> None:
        """Read the files."""
        ...
