"""Forecasts of sources that are fitted to other kernels' sources: robust regression, and trees.

Everything is fitted without the whole family of the kernel that is forecast. Differences of sources have heavy
tails (most change nothing, some double the time), so a forecast is a mean by least squares, and a Student t
with two scales, whose mode and logarithms of scales are linear in features, fitted by penalised likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import optimize, special, stats

from forecast_train.evaluation import metrics

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

RIDGE = 1.0
"""Penalty on the squares of standardised coefficients, in units of one observation's log likelihood."""
LEAST_SCALE, LEAST_FREEDOM, MOST_FREEDOM = 0.005, 1.2, 30.0
INNER_FOLDS = 5
TREES = 100
CLIP = 1.5
"""log2 beyond which trees need not tell how much slower or faster a source is."""
MEAN_CLIP = 1.0
"""Of what means are fitted to: how slow a slow source is must not decide how fast ones are told apart."""
LEVELS = (np.arange(200) + 0.5) / 200
"""Of quantiles that stand for a distribution."""


@dataclass(frozen=True)
class StudentForecasts:
    """Distributions of log2 ratios, [n] each: a Student t whose halves have scales of their own.

    Few changes make a kernel much faster, and many much slower, so one scale would promise gains where only
    losses are likely. The degrees of freedom are common.
    """

    mode: FloatArray
    faster: FloatArray
    """Scale below the mode."""
    slower: FloatArray
    """Scale above it."""
    freedom: float

    @property
    def centre(self) -> FloatArray:
        """Medians."""
        return self.quantiles(np.array([0.5]))[0]

    def log_density(self, truth: FloatArray) -> FloatArray:
        """ln density, [n]."""
        side = np.where(truth < self.mode, self.faster, self.slower)
        density = stats.t.logpdf((truth - self.mode) / side, self.freedom)
        return np.asarray(density + np.log(2.0 / (self.faster + self.slower)))

    def quantiles(self, levels: FloatArray) -> FloatArray:
        """Quantiles, [levels, n]."""
        both = self.faster + self.slower
        level = levels[:, None]
        low = stats.t.ppf(np.minimum(0.5, level * both / (2.0 * self.faster)), self.freedom)
        high = stats.t.isf(np.minimum(0.5, (1.0 - level) * both / (2.0 * self.slower)), self.freedom)
        side = level < self.faster / both
        return np.asarray(self.mode + np.where(side, self.faster * low, self.slower * high))

    def crps(self, truth: FloatArray) -> FloatArray:
        """Continuous ranked probability score, [n], of `LEVELS` quantiles."""
        return metrics.crps_samples(self.quantiles(LEVELS), truth)

    def below(self, edges: FloatArray) -> FloatArray:
        """P(log2 ratio < edge), [n, edges]."""
        away = edges[None, :] - self.mode[:, None]
        faster, slower = self.faster[:, None], self.slower[:, None]
        low = 2.0 * faster * stats.t.cdf(np.minimum(0.0, away) / faster, self.freedom)
        high = 2.0 * slower * (stats.t.cdf(np.maximum(0.0, away) / slower, self.freedom) - 0.5)
        return np.asarray((low + high) / (faster + slower))

    def shifted(self, by: float) -> StudentForecasts:
        """All of them, faster or slower."""
        return replace(self, mode=self.mode + by)

    def rows(self, at: npt.NDArray[np.intp] | BoolArray) -> StudentForecasts:
        """Those of some rows."""
        return StudentForecasts(self.mode[at], self.faster[at], self.slower[at], self.freedom)


class _Scaler:
    def __init__(self, x: FloatArray) -> None:
        self.mean, spread = x.mean(axis=0), x.std(axis=0)
        self.spread = np.where(spread > 1e-9, spread, 1.0)

    def __call__(self, x: FloatArray) -> FloatArray:
        return np.column_stack([np.ones(len(x)), (x - self.mean) / self.spread])


def fit_student(
    centre: FloatArray, scale: FloatArray, truth: FloatArray
) -> Callable[[FloatArray, FloatArray], StudentForecasts]:
    """Fit to features of the centre [n, p], of the scale [n, q] and truths [n]; the answer forecasts others."""
    first, second = _Scaler(centre), _Scaler(scale)
    x, z = first(centre), second(scale)
    p, q = x.shape[1], z.shape[1]
    start = np.zeros(p + 2 * q + 1)
    start[[p, p + q]] = math.log(max(LEAST_SCALE, float(np.median(np.abs(truth - np.median(truth))))))
    start[-1] = 1.0

    def width(design: FloatArray, beta: FloatArray) -> FloatArray:
        return np.asarray(LEAST_SCALE + np.exp(np.clip(design @ beta, -7.0, 2.0)))

    def degrees(beta: float) -> float:
        return min(MOST_FREEDOM, LEAST_FREEDOM + math.exp(min(5.0, beta)))

    def loss(beta: FloatArray) -> float:
        faster, slower = width(z, beta[p : p + q]), width(z, beta[p + q : -1])
        away, freedom = truth - x @ beta[:p], degrees(beta[-1])
        r = away / np.where(away < 0, faster, slower)
        norm = special.gammaln((freedom + 1) / 2) - special.gammaln(freedom / 2)
        norm -= 0.5 * math.log(freedom * math.pi)
        likely = norm - np.log((faster + slower) / 2) - (freedom + 1) / 2 * np.log1p(r**2 / freedom)
        slopes = (beta[1:p] ** 2).sum() / 0.01
        slopes += (beta[p + 1 : p + q] ** 2).sum() + (beta[p + q + 1 : -1] ** 2).sum()
        return float(-likely.sum() + 0.5 * RIDGE * slopes + 0.05 * (beta[-1] - 1.0) ** 2)

    found = optimize.minimize(loss, start, method="L-BFGS-B").x

    def forecast(own_centre: FloatArray, own_scale: FloatArray) -> StudentForecasts:
        design = second(own_scale)
        return StudentForecasts(
            first(own_centre) @ found[:p],
            width(design, found[p : p + q]),
            width(design, found[p + q : -1]),
            degrees(float(found[-1])),
        )

    return forecast


def fit_mean(x: FloatArray, truth: FloatArray) -> Callable[[FloatArray], FloatArray]:
    """Least squares of truths, cut off at `MEAN_CLIP`, on forecasts [n, p], none of which counts against itself."""
    design = np.column_stack([np.ones(len(x)), -np.ones(len(x)), x])
    beta, _ = optimize.nnls(design, np.clip(truth, -MEAN_CLIP, MEAN_CLIP))
    return lambda own: np.asarray(beta[0] - beta[1] + own @ beta[2:])


def forecasts_without_family(
    centre: Sequence[FloatArray] | FloatArray,
    scale: FloatArray,
    truth: FloatArray,
    families: Sequence[str],
) -> tuple[FloatArray, StudentForecasts]:
    """Means [n] by `fit_mean`, and distributions around them, of rows whose family neither was fitted to.

    `centre` is [n, p] or, where features are fitted themselves, one [n, p] per family in sorted order: its rows
    of other families were made without the family too. A truth of NaN is not fitted to.
    """
    names = np.asarray(families, dtype=object)
    mean, mode = np.zeros(len(truth)), np.zeros(len(truth))
    faster, slower = np.ones(len(truth)), np.ones(len(truth))
    freedoms = []
    for place, family in enumerate(sorted(set(families))):
        x = centre if isinstance(centre, np.ndarray) else centre[place]
        own = names == family
        fit = ~own & np.isfinite(truth)
        mean[own] = fit_mean(x[fit], truth[fit])(x[own])
        said = fit_student(x[fit], scale[fit], truth[fit])(x[own], scale[own])
        mode[own], faster[own], slower[own] = said.mode, said.faster, said.slower
        freedoms.append(said.freedom)
    return mean, StudentForecasts(mode, faster, slower, float(np.median(freedoms)))


def trees_without_family(
    features: FloatArray, truth: FloatArray, families: Sequence[str], seed: int = 0
) -> list[FloatArray]:
    """Forecasts by extremely randomised trees, [n] per family in sorted order.

    The rows of the family itself are forecast by trees that have seen all others, the other rows by trees that
    have seen neither them (whole families at a time) nor the family: what a second fit may learn from.
    """
    from sklearn.ensemble import ExtraTreesRegressor

    names = np.asarray(families, dtype=object)
    x = np.nan_to_num(features, nan=0.0)
    y = np.clip(truth, -CLIP, CLIP)
    order = sorted(set(families))

    def forecast(fit: BoolArray, own: BoolArray) -> FloatArray:
        forest = ExtraTreesRegressor(TREES, min_samples_leaf=3, max_features=0.4, random_state=seed, n_jobs=1)
        forest.fit(x[fit], y[fit])
        return np.asarray(forest.predict(x[own]))

    found = []
    for family in order:
        outer, said = names == family, np.zeros(len(y))
        said[outer] = forecast(~outer & np.isfinite(y), outer)
        others = [f for f in order if f != family]
        for fold in range(INNER_FOLDS):
            inner = np.isin(names, others[fold::INNER_FOLDS])
            if inner.any():
                said[inner] = forecast(~outer & ~inner & np.isfinite(y), inner)
        found.append(said)
    return found


def logistic_without_family(x: FloatArray, happened: BoolArray, families: Sequence[str]) -> FloatArray:
    """P(happened) of every row by a logistic regression on x [n, p] that has not seen its family."""
    names = np.asarray(families, dtype=object)
    found = np.zeros(len(happened))
    for family in sorted(set(families)):
        own = names == family
        scaler = _Scaler(x[~own])
        design, label = scaler(x[~own]), happened[~own].astype(float)

        def loss(beta: FloatArray, design: FloatArray = design, label: FloatArray = label) -> float:
            logit = design @ beta
            return float(np.logaddexp(0.0, logit).sum() - label @ logit + 0.5 * RIDGE * (beta[1:] ** 2).sum())

        beta = optimize.minimize(loss, np.zeros(design.shape[1]), method="L-BFGS-B").x
        found[own] = special.expit(scaler(x[own]) @ beta)
    return found


def common_shift(said: StudentForecasts, measured: BoolArray, truth: FloatArray, prior_sd: float) -> float:
    """What the sources of a kernel have in common beyond their forecasts, after some were measured.

    The mean of their residuals, each weighed by its scale and counted to two scales at most, is shrunk towards
    zero as a normal of `prior_sd` would have it. Sources that failed say nothing.
    """
    fine = measured & np.isfinite(truth)
    if not fine.any():
        return 0.0
    away = truth[fine] - said.centre[fine]
    scale = np.where(away < 0, said.faster[fine], said.slower[fine])
    residual, weight = np.clip(away, -2.0 * scale, 2.0 * scale), 1.0 / scale**2
    return float(weight @ residual / (weight.sum() + prior_sd**-2))
