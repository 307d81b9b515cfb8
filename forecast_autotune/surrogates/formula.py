"""The surrogate of this release: an untrained cost formula, corrected by what has been measured.

log2(time) = formula + intercept + slope terms + smooth residual over the configs' coordinates: a
Gaussian process (Rasmussen & Williams 2006, ch. 2) whose prior mean is the formula. The slope terms
let measurements scale the formula, or one of its parts, away when it is wrong; measurements of the
same kernel at other shapes enter as correlated observations with intercepts of their own, so a
similar shape teaches much and a different regime little. numpy only: importing scikit-learn alone
would cost more than all forecasts of a decision together.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.features.config_encoder import ConfigEncoder
from forecast_autotune.features.devices import is_known_device, is_measured_device
from forecast_autotune.features.traced_texts import fact_count, facts_by_unit
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.records import Candidate, Measurement, Problem
from forecast_autotune.records.table import latest_labels
from forecast_autotune.surrogates.calibration import calibration_group, shipped_calibration
from forecast_autotune.surrogates.covariance import (
    Covariance,
    CovarianceInputs,
    Hyperparameters,
    Posterior,
    Rows,
    unshared_leaves,
)
from forecast_autotune.surrogates.prior import VERSION, Prior, formula_prior, memory_failure
from forecast_autotune.surrogates.protocol import Array, Forecasts, Query, Relative
from forecast_autotune.surrogates.relatives import Kinship, kinship, problem_distance

if TYPE_CHECKING:
    from forecast_autotune.llm.advice.subject import AdviceSubject

_MOST_RELATIVE_PRIORS = 256
_SLOPE_REACH = 1.0
"""Doublings of a part of the cost up to which its slope counts in full; further ones count ever less."""

_WARP_REACH = 2.0
"""Doublings of warps up to which their trend counts in full."""


@dataclass(frozen=True)
class _RelativeObservations:
    """The observations of relatives, which do not change while one problem is tuned."""

    key: tuple[object, ...]
    """Objects that they follow from; strong references, so that no other object can take their identity."""
    inputs: list[CovarianceInputs]
    residual: list[Array]
    correlation: list[float]
    kinship: Kinship
    """See `relatives.kinship`."""


@dataclass
class _Observations:
    """Observed residuals, this problem's first, then the relatives'; and the process that explains them best."""

    candidates: CandidateList
    own: Sequence[Measurement]
    relatives: _RelativeObservations
    candidate_inputs: CovarianceInputs
    prior_mean: Array
    """Compressed log2 times of the candidates before any measurement, [n]."""
    inputs: CovarianceInputs
    residual: Array
    group: npt.NDArray[np.intp]
    """0 for this problem, 1.. for each relative."""
    correlation: Array
    """Correlation of each group's residual with this problem's, [groups]."""
    best: float
    """log2 milliseconds of this problem's fastest; +inf when nothing has run."""
    scale: float
    root: Array = field(default_factory=lambda: np.zeros((0, 0)))
    """Cholesky factor of the covariance of the residuals."""
    log_likelihood: float = 0.0


_SCALE_FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0)
_LEAST_SHARED = 64.0
"""Bytes below which no error of a forecast matters."""
_KERNELS_ERROR = 0.7
"""Share of an error of forecast bytes that all configs of a kernel have in common."""


class AnalyticSurrogate:
    """Formula + Gaussian-process update; see the module."""

    name = "analytic"
    version = f"{VERSION}-gp-3"
    trees = 0
    """Number of trees in `Prior.leaves`."""

    def __init__(self, hyper: Hyperparameters | None = None, *, relatives: int = 4, rows: int = 64) -> None:
        self.hyper = hyper or Hyperparameters()
        self.covariance = Covariance(self.hyper)
        self.relatives = relatives
        self.rows = rows
        self._cached_relatives: _RelativeObservations | None = None
        """Relatives' observations for the latest query: a decision has many queries about the same relatives."""
        self._cache: dict[bool, _Observations] = {}
        self._relative_priors: dict[tuple[Any, ...], Prior] = {}
        """Priors of relatives that have facts of their own: the next decision about the kernel needs most of them."""

    def forecast(self, query: Query) -> Forecasts:
        """Forecast all candidates; never raises for odd problems, but widens their distributions."""
        query = replace(query, candidates=CandidateList.of(query.candidates))
        return self.answer(query, self.prior(query))

    def advised_rows(self, query: Query) -> Rows:
        """Rows of the candidates that advice on the problem's kernel is about."""
        return np.flatnonzero([c.is_base_variant for c in query.candidates])

    def advice_subject(self, query: Query, rows: Rows) -> AdviceSubject:
        """These candidates as a cost function sees them."""
        from forecast_autotune.llm.advice.subject import AdviceSubject

        return AdviceSubject.of(query.problem, [query.candidates[int(i)] for i in rows], query.grids)

    def answer(self, query: Query, before: Prior) -> Forecasts:
        """The forecast that follows from the query's measurements and the prior `before` them."""
        data = self._observations(query, before)
        candidates, inputs, scale = data.candidates, data.candidate_inputs, data.scale
        p_fail = _failures(before, candidates.row_of, inputs.points, query.measured)
        kernel = self.covariance(inputs, data.inputs, scale)
        cross = kernel * data.correlation[data.group] + self.hyper.intercept**2 * (data.group == 0)
        # Inverted once: with thousands of candidates, two solves per candidate would cost twice as much.
        inverse = np.linalg.inv(data.root) if len(data.root) else data.root
        half, white = inverse @ cross.T, inverse @ data.residual
        # Facts that were interpolated from neighbours are worth less.
        loose = (scale * self.hyper.rough) ** 2 * np.where(before.exact | (not before.informed), 0.0, 8.0)
        is_anchored, mean = math.isfinite(data.best), data.prior_mean + half.T @ white
        floor = data.best if is_anchored else float(before.mean.min())
        posterior = Posterior(self.covariance, inputs, scale, mean, half, loose, floor, is_anchored)
        forecasts = posterior.forecasts(candidates, p_fail, self._reason(before, data))
        count, kinship_to = int((data.group == 0).sum()), data.relatives.kinship
        honest = shipped_calibration(f"{self.name}/{self.version}")
        informed, away = before.informed, before.training_distance
        group = calibration_group(query.problem.device, informed, len(candidates), kinship_to, away)
        return honest.apply_to(forecasts, group, count)

    def log_likelihood(self, query: Query, before: Prior) -> float:
        """Log likelihood of the measurements of this problem and its relatives under the prior `before` them."""
        return self._observations(query, before).log_likelihood

    def prior(self, query: Query) -> Prior:
        """The prior of the candidates, before any measurement."""
        return formula_prior(query.problem, query.candidates, query.grids, query.ttir)

    def inputs(
        self, candidates: Sequence[Candidate], before: Prior, encoder: ConfigEncoder | None = None
    ) -> tuple[CovarianceInputs, Array]:
        """The covariance's inputs for the candidates, and their compressed forecast log2 times [n]."""
        encoder = encoder or ConfigEncoder.of(candidates)
        prior_mean = self.hyper.compress(before.mean, float(before.mean.min()))
        places = encoder(candidates)
        if before.same_as is not None:
            places = places[before.same_as]
        points = places / self.hyper.length_scales(encoder)
        leaves = unshared_leaves(len(candidates), self.trees) if before.leaves is None else before.leaves
        # The slope terms multiply centred columns: the formula's total, then its parts. A part that is doublings
        # away from all others (of a config that spills) is far off, not uncertain by as many doublings.
        parts = _SLOPE_REACH * np.tanh((before.parts - before.parts.mean(axis=0)) / _SLOPE_REACH)
        slopes = [(prior_mean - prior_mean.mean())[:, None], parts - parts.mean(axis=0)]
        return CovarianceInputs(
            points, np.concatenate(slopes, axis=1), leaves, _warp_doublings(places, encoder)
        ), prior_mean

    def _reason(self, before: Prior, data: _Observations) -> str:
        basis = (
            "cost formula on TTIR" if before.informed else "no TTIR, grid or sizes: config coordinates only"
        )
        own = int((data.group == 0).sum())
        related = len(data.group) - own
        return f"{basis}; {own} own and {related} related measurements"

    def _residual_scale(self, problem: Problem, before: Prior) -> float:
        scale = 1.0 if before.informed else self.hyper.uninformed
        # Without IR the formula says nothing: then it does not matter whether the device was measured.
        sure = is_measured_device(problem.device) if before.informed else is_known_device(problem.device)
        return scale if sure else scale * self.hyper.unknown_device

    def _observations(self, query: Query, before: Prior) -> _Observations:
        """The observations of a query, from the cache if it was the latest one with, or without, own measurements."""
        candidates = CandidateList.of(query.candidates)
        encoder, row = ConfigEncoder.of(candidates), candidates.row_of
        own = [m for m in latest_labels(query.measured).values() if m.ok and m.candidate in row]
        relatives = self._relative_observations(query, encoder, before)
        last = self._cache.get(bool(own))
        if last and last.candidates is candidates and last.relatives is relatives and last.own == own:
            return last
        inputs, prior_mean = self.inputs(candidates, before, encoder)
        index = np.array([row[m.candidate] for m in own], dtype=np.intp)
        times = np.array([math.log2(m.ms) for m in own])
        best = float(times.min()) if own else math.inf
        sizes = [len(own), *map(len, relatives.residual)]
        joint = CovarianceInputs.concatenate([inputs[index], *relatives.inputs])
        residual = np.concatenate([self.hyper.compress(times, best) - prior_mean[index], *relatives.residual])
        group, correlation = np.repeat(np.arange(len(sizes)), sizes), np.array([1.0, *relatives.correlation])
        scale = self._residual_scale(query.problem, before)
        data = _Observations(
            candidates, own, relatives, inputs, prior_mean, joint, residual, group, correlation, best, scale
        )
        if len(data.residual):
            self._fit_scale(data)
        self._cache[bool(own)] = data
        return data

    def _relative_observations(
        self, query: Query, encoder: ConfigEncoder, before: Prior
    ) -> _RelativeObservations:
        """Inputs and residuals of relatives with any times, and their correlations with this problem's.

        Cached for the same prior and relatives, if their measurements are tuples, which cannot grow.
        """
        key, last = (query.problem, before, *query.relatives), self._cached_relatives
        if last is not None and len(last.key) == len(key) and all(map(operator.is_, last.key, key)):
            return last
        nearest = list(query.relatives)[: self.relatives]
        result = _RelativeObservations(key, [], [], [], kinship(query.problem, nearest))
        for relative in nearest:
            rows = sorted((m for m in relative.labels.values() if m.ok), key=lambda m: m.ms)
            if len(rows) > self.rows:  # keep the fast half whole, thin the slow tail
                keep = self.rows // 2
                rows = rows[:keep] + rows[keep :: max(1, (len(rows) - keep) // keep)][:keep]
            if not rows:
                continue
            prior = self._relative_prior(relative, rows, before, query.ttir)
            log2_ms = np.array([math.log2(m.ms) for m in rows])
            inputs, prior_mean = self.inputs([m.candidate for m in rows], prior, encoder)
            result.inputs.append(inputs)
            result.residual.append(self.hyper.compress(log2_ms, float(log2_ms.min())) - prior_mean)
            away = problem_distance(query.problem, relative.problem) / self.hyper.reach
            result.correlation.append(self.hyper.relative * math.exp(-away))
        self._cached_relatives = (
            result if all(isinstance(r.measurements, tuple) for r in query.relatives) else None
        )
        return result

    def _relative_prior(
        self, relative: Relative, rows: Sequence[Measurement], before: Prior, ttir: Mapping[str, str]
    ) -> Prior:
        """Formula and parts at the relative's own problem, or flat where this problem's are not known.

        A store keeps no IR, except of a harvest. Where a relative's record has no facts, this problem's IR of the same
        assignments is read with the relative's arguments and grids.
        """
        names = [m.candidate for m in rows]
        grids = {m.candidate: m.grid for m in rows if m.grid is not None}
        problem = relative.problem
        key = (problem.id, fact_count(problem), len(problem.ttir), tuple(names), tuple(m.grid for m in rows))
        prior = self._relative_priors.get(key)
        if prior is None:
            texts = _borrowed_texts(problem, names, grids, ttir)
            prior = self.prior(Query(problem, names, grids, ttir={**texts, **problem.ttir}))
            if not texts:  # else it depends on this query's IR, too
                if len(self._relative_priors) >= _MOST_RELATIVE_PRIORS:
                    self._relative_priors.clear()
                self._relative_priors[key] = prior
        if prior.informed == before.informed:
            return prior
        zero = np.zeros(len(rows))
        return replace(prior, mean=zero, parts=np.zeros((len(rows), before.parts.shape[1])), leaves=None)

    def _coupled_covariance(self, data: _Observations, base: Array) -> Array:
        same = data.group[:, None] == data.group[None, :]
        across = data.correlation[data.group]
        # Two relatives are tied through this problem: their correlation is the product of both ties.
        tie = np.where(same, 1.0, across[:, None] * across[None, :])
        return np.asarray(base * tie + self.hyper.intercept**2 * same)

    def _fit_scale(self, data: _Observations) -> None:
        """Find the residual's size that explains the measurements best, within a factor of four."""
        smooth = self.covariance.residual(data.inputs, data.inputs)
        tilt = self.covariance.slope_terms(data.inputs, data.inputs)
        scales = [data.scale * factor for factor in _SCALE_FACTORS]
        squares = np.array([scale**2 for scale in scales])[:, None, None]
        matrices = self._coupled_covariance(data, squares * smooth + tilt)
        np.einsum("sii->si", matrices)[:] += self.hyper.noise**2
        roots, best = np.linalg.cholesky(matrices), -math.inf
        whites = np.linalg.solve(roots, data.residual[:, None])[..., 0]
        for factor, scale, root, white in zip(_SCALE_FACTORS, scales, roots, whites, strict=True):
            likelihood = -0.5 * float(white @ white) - float(np.log(np.diag(root)).sum())
            # A log-normal prior of one doubling keeps few measurements from shrinking the doubt.
            if (odds := likelihood - 0.5 * math.log2(factor) ** 2 / 0.5) > best:
                best, data.scale, data.root, data.log_likelihood = odds, scale, root, likelihood


def _warp_doublings(places: Array, encoder: ConfigEncoder) -> Array:
    """Doublings of warps relative to the candidates' mean, over the root of the number of coordinates, [n].

    Zeros where warps do not differ. The more other coordinates differ, the less warps matter. `places` are the
    encoder's coordinates [n, width].
    """
    column = next((i for i, (name, _) in enumerate(encoder.numeric) if name == "num_warps"), None)
    if column is None:
        return np.zeros(len(places))
    away = places[:, column] - places[:, column].mean()
    return np.asarray(_WARP_REACH * np.tanh(away / _WARP_REACH) / math.sqrt(places.shape[1]))


def _borrowed_texts(
    problem: Problem,
    candidates: Sequence[Candidate],
    grids: Mapping[Candidate, tuple[int, ...]],
    ttir: Mapping[str, str],
) -> Mapping[str, str]:
    """The texts of `ttir` for candidates without facts in a relative's record: reading a text takes milliseconds."""
    facts = facts_by_unit(problem)
    names = {
        name
        for c in candidates
        if ((name := assignment_of(c)), grids.get(c, problem.grid)) not in facts and name in ttir
    }
    return {name: ttir[name] for name in names}


def _failures(
    before: Prior, row: Mapping[Candidate, int], points: Array, measured: Sequence[Measurement]
) -> Array:
    """P(failure) after measurements: known bytes correct the others' forecast; without any, neighbours fail alike."""
    labels = {row[m.candidate]: m for m in latest_labels(measured).values() if m.candidate in row}
    sizes = {i: m.shared_bytes for i, m in labels.items()}
    p_fail = _corrected_failure(before, points, {i: float(size) for i, size in sizes.items() if size})
    for i, m in labels.items():
        if m.ok:
            if before.informed:
                p_fail[before.shared <= before.shared[i]] *= 0.5
        elif sizes[i] is None or before.doubt is None:
            near = np.exp(-((points - points[i]) ** 2).sum(axis=1))
            p_fail = np.maximum(p_fail, 0.9 * near)
    for i, m in labels.items():
        p_fail[i] = 0.0 if m.ok else 1.0
    return p_fail


def _corrected_failure(before: Prior, points: Array, sizes: Mapping[int, float]) -> Array:
    """P(failure) once the compiler has shown the `sizes`, in bytes of shared memory, of some rows.

    The forecasts' errors in log2 are a Gaussian process: most of an error is the kernel's, the rest its neighbours'.
    An error where the rules were sure raises the doubt of all rows.
    """
    if before.doubt is None or not sizes:
        return before.p_fail.copy()
    rows = np.array(list(sizes))
    forecast = np.log2(np.maximum(before.shared, _LEAST_SHARED))
    error = np.log2(np.maximum(list(sizes.values()), _LEAST_SHARED)) - forecast[rows]
    squares = (points**2).sum(axis=1)
    near = np.exp(2.0 * points @ points[rows].T - squares[:, None] - squares[rows])
    doubt = before.doubt
    kernel = doubt[:, None] * doubt[rows] * (_KERNELS_ERROR + (1.0 - _KERNELS_ERROR) * near)
    own = kernel[rows] + 1e-6 * np.eye(len(rows))
    scale = max(1.0, float(error @ np.linalg.solve(own, error)) / len(rows))
    gain = np.linalg.solve(own, kernel.T)
    sd = np.sqrt(scale * np.maximum(doubt**2 - (kernel.T * gain).sum(axis=0), 1e-6))
    p_fail = memory_failure(2.0 ** (forecast + error @ gain), sd, before.limit)
    # Other reasons against a candidate than its bytes still count.
    besides = before.p_fail - memory_failure(before.shared, doubt, before.limit)
    return np.asarray(np.clip(p_fail + np.maximum(besides, 0.0), 0.0, 0.99))
