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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.devices import known as device_known
from forecast_autotune.features.encode import Encoder
from forecast_autotune.records import Candidate, Outcome, Problem
from forecast_autotune.results import Measurement
from forecast_autotune.surrogates.base import Array, Forecasts, Query, Relative
from forecast_autotune.surrogates.calibration import shipped
from forecast_autotune.surrogates.prior import VERSION, Prior, prior
from forecast_autotune.table import latest

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Hyper:
    """Standard deviations in log2 units and length scales in doublings; see `Encoder`."""

    intercept: float = 2.0
    slope: float = 0.35
    """Of the formula's total."""
    part_slope: float = 0.12
    """Of each of its parts."""
    additive: float = 0.35
    joint: float = 0.35
    rough: float = 0.1
    """What no neighbour can tell about a config, though the same config at another shape can."""
    noise: float = 0.02
    additive_scale: float = 1.5
    joint_scale: float = 2.0
    uninformed: float = 1.8
    """Factor on the residual when there is no TTIR."""
    unknown_device: float = 1.3
    relative: float = 0.95
    """Correlation of residuals between two problems of one kernel at distance zero."""
    reach: float = 8.0
    """Distance (mean doublings of sizes) at which that correlation has fallen by 1/e."""
    knee: float = 1.5
    """Slowdowns beyond 2^knee are compressed: how slow a slow config is must not bend the fast end."""
    beyond: float = 0.25
    """... by this factor."""


@dataclass(frozen=True)
class _Known:
    """Observed residuals: own rows first, then the relatives'."""

    points: Array
    slopes: Array
    residual: Array
    group: npt.NDArray[np.intp]
    """0 for this problem, 1.. for each relative."""
    correlation: Array
    """Of each group's residual with this problem's, [groups]."""
    best: float
    """log2 milliseconds of this problem's fastest; +inf when nothing has run."""


class Analytic:
    """Formula + Gaussian-process update; see the module."""

    name = "analytic"
    version = f"{VERSION}-gp-1"

    def __init__(self, hyper: Hyper | None = None, *, relatives: int = 4, rows: int = 64) -> None:
        self.hyper = hyper or Hyper()
        self.relatives = relatives
        self.rows = rows

    def forecast(self, query: Query) -> Forecasts:
        """Forecast all candidates; never raises for odd problems, it widens instead."""
        candidates = list(query.candidates)
        before = self.before(query.problem, candidates, query.grids, query.ttir)
        encoder = Encoder.of(candidates)
        points = encoder(candidates)
        floor = float(before.mean.min())
        believed = self._compress(before.mean, floor)
        slopes = _slopes(believed, before.parts)
        known = self._observations(query, encoder, before, believed, slopes)
        scale = self._scale(query.problem, before)
        p_fail = _failures(before, candidates, points, query.measured)
        if not len(known.residual):
            kernel = self._kernel(points, slopes, points[:0], slopes[:0], scale)
        else:
            scale = self._fit_scale(known, scale)
            kernel = self._kernel(points, slopes, known.points, known.slopes, scale)
        oo = self._covariance(known, scale)
        oo[np.diag_indices_from(oo)] += self.hyper.noise**2
        cross = kernel * known.correlation[known.group] + self.hyper.intercept**2 * (known.group == 0)
        factor = np.linalg.cholesky(oo) if len(oo) else np.zeros((0, 0))
        half = np.linalg.solve(factor, cross.T) if len(oo) else np.zeros((0, len(candidates)))
        white = np.linalg.solve(factor, known.residual) if len(oo) else np.zeros(0)
        mean = believed + half.T @ white
        own = self._diagonal(points, slopes, scale)
        # Facts that were interpolated from neighbours are worth less.
        loose = (scale * self.hyper.rough) ** 2 * np.where(before.exact | (not before.informed), 0.0, 8.0)
        variance = np.maximum(own + self.hyper.intercept**2 - (half**2).sum(axis=0), 1e-8) + loose

        anchored = math.isfinite(known.best)
        floor = known.best if anchored else floor
        common = 0.0 if anchored else self.hyper.intercept
        variance -= common**2

        def sample(rows: Rows, count: int, generator: np.random.Generator) -> Array:
            block = self._kernel(points[rows], slopes[rows], points[rows], slopes[rows], scale)
            block = block + self.hyper.intercept**2 - common**2 - half[:, rows].T @ half[:, rows]
            block[np.diag_indices_from(block)] += loose[rows] + 1e-8
            values, vectors = np.linalg.eigh(block)
            root = vectors * np.sqrt(np.maximum(values, 0.0))
            drawn = mean[rows] + generator.standard_normal((count, len(rows))) @ root.T
            # Before anything has run, the level is unknown, but it is the same for all candidates.
            return self._expand(drawn, floor) + common * generator.standard_normal((count, 1))

        sd = np.sqrt(np.maximum(variance, 1e-8))
        # The slow end was squeezed: undo that for the spread as well as for the mean.
        spread = (self._expand(mean + sd, floor) - self._expand(mean - sd, floor)) / 2
        return Forecasts(
            candidates,
            self._expand(mean, floor),
            np.hypot(spread, common),
            p_fail,
            sample,
            self._reason(before, known),
            self._expand(mean - 2 * sd, floor) - 2 * common,
            shipped(f"{self.name}/{self.version}"),
        )

    def before(
        self,
        problem: Problem,
        candidates: Sequence[Candidate],
        grids: Mapping[Candidate, tuple[int, ...]],
        ttir: Mapping[str, str],
    ) -> Prior:
        """What is believed of the candidates before anything was measured."""
        return prior(problem, candidates, grids, ttir)

    def _compress(self, log2_ms: Array, floor: float) -> Array:
        """Slowdowns over `floor` (log2) with the slow end squeezed together; monotone."""
        over = log2_ms - floor
        bent = self.hyper.knee + self.hyper.beyond * (over - self.hyper.knee)
        return np.asarray(floor + np.where(over > self.hyper.knee, bent, over))

    def _expand(self, log2_ms: Array, floor: float) -> Array:
        """The inverse of `_compress`."""
        over = log2_ms - floor
        bent = self.hyper.knee + (over - self.hyper.knee) / self.hyper.beyond
        return np.asarray(floor + np.where(over > self.hyper.knee, bent, over))

    def _reason(self, before: Prior, known: _Known) -> str:
        basis = (
            "cost formula on TTIR" if before.informed else "no TTIR, grid or sizes: config coordinates only"
        )
        own = int((known.group == 0).sum())
        others = len(known.group) - own
        return f"{basis}; {own} own and {others} related measurements"

    def _scale(self, problem: Problem, before: Prior) -> float:
        scale = 1.0 if before.informed else self.hyper.uninformed
        return scale if device_known(problem.device) else scale * self.hyper.unknown_device

    def _observations(
        self, query: Query, encoder: Encoder, before: Prior, believed: Array, slopes: Array
    ) -> _Known:
        row = {c: i for i, c in enumerate(query.candidates)}
        mine = [m for m in latest(query.measured).values() if m.ok and m.candidate in row]
        index = np.array([row[m.candidate] for m in mine], dtype=np.intp)
        times = np.array([math.log2(m.ms) for m in mine])
        best = float(times.min()) if mine else math.inf
        points = [encoder([m.candidate for m in mine])]
        tilt = [slopes[index]]
        residual = [self._compress(times, best) - believed[index]]
        group = [np.zeros(len(mine), dtype=np.intp)]
        correlation = [1.0]
        for relative in list(query.relatives)[: self.relatives]:
            rows = sorted((m for m in latest(relative.measurements).values() if m.ok), key=lambda m: m.ms)
            if len(rows) > self.rows:  # keep the fast half whole, thin the slow tail
                keep = self.rows // 2
                rows = rows[:keep] + rows[keep :: max(1, (len(rows) - keep) // keep)][:keep]
            if not rows:
                continue
            there, parts = self._relative_prior(relative, rows, before, query.ttir)
            there = self._compress(there, float(there.min()))
            seen = np.array([math.log2(m.ms) for m in rows])
            points.append(encoder([m.candidate for m in rows]))
            tilt.append(_slopes(there, parts))
            residual.append(self._compress(seen, float(seen.min())) - there)
            away = distance(query.problem, relative.problem) / self.hyper.reach
            correlation.append(self.hyper.relative * math.exp(-away))
            group.append(np.full(len(rows), len(correlation) - 1, dtype=np.intp))
        return _Known(
            np.concatenate(points),
            np.concatenate(tilt),
            np.concatenate(residual),
            np.concatenate(group),
            np.array(correlation),
            best,
        )

    def _relative_prior(
        self, relative: Relative, rows: Sequence[Measurement], before: Prior, ttir: Mapping[str, str]
    ) -> tuple[Array, Array]:
        """Formula and parts at the relative's own problem, or flat where this problem's are not known.

        A store keeps no IR, except of a harvest: the same assignments have the same here, to be read with
        the relative's arguments and grids.
        """
        names = [m.candidate for m in rows]
        grids = {m.candidate: m.grid for m in rows if m.grid is not None}
        there = self.before(relative.problem, names, grids, {**ttir, **relative.problem.ttir})
        if there.informed == before.informed:
            return there.mean, there.parts
        return np.zeros(len(rows)), np.zeros((len(rows), before.parts.shape[1]))

    def _weights(self, width: int) -> Array:
        weights = np.full(width, self.hyper.part_slope**2)
        weights[0] = self.hyper.slope**2
        return weights

    def _kernel(self, a: Array, fa: Array, b: Array, fb: Array, scale: float) -> Array:
        h = self.hyper
        far = np.zeros((len(a), len(b)))
        additive = np.zeros((len(a), len(b)))
        for left, right in zip(a.T, b.T, strict=True):  # one coordinate at a time: thousands of rows fit
            step = (left[:, None] - right[None, :]) ** 2
            far += step
            additive += np.exp(-0.5 * step / h.additive_scale**2)
        additive /= a.shape[1]
        joint = np.exp(-0.5 * far / h.joint_scale**2)
        slope = (fa * self._weights(fa.shape[1])) @ fb.T
        smooth = h.additive**2 * additive + h.joint**2 * joint + h.rough**2 * (far < 1e-9)
        return np.asarray(scale**2 * smooth + slope)

    def _diagonal(self, points: Array, slopes: Array, scale: float) -> Array:
        h = self.hyper
        flat = scale**2 * (h.additive**2 + h.joint**2 + h.rough**2)
        return np.asarray(flat + (slopes**2 * self._weights(slopes.shape[1])).sum(axis=1))

    def _covariance(self, known: _Known, scale: float) -> Array:
        base = self._kernel(known.points, known.slopes, known.points, known.slopes, scale)
        same = known.group[:, None] == known.group[None, :]
        across = known.correlation[known.group]
        # Two relatives are tied through this problem: their correlation is the product of both ties.
        tie = np.where(same, 1.0, across[:, None] * across[None, :])
        return np.asarray(base * tie + self.hyper.intercept**2 * same)

    def _fit_scale(self, known: _Known, scale: float) -> float:
        """The residual's size that explains the measurements best, within a factor of four."""
        best, choice = -math.inf, scale
        for factor in (0.5, 0.7, 1.0, 1.4, 2.0):
            matrix = self._covariance(known, scale * factor)
            matrix[np.diag_indices_from(matrix)] += self.hyper.noise**2
            root = np.linalg.cholesky(matrix)
            white = np.linalg.solve(root, known.residual)
            # A log-normal prior of one doubling keeps few measurements from shrinking the doubt.
            likelihood = -0.5 * float(white @ white) - float(np.log(np.diag(root)).sum())
            likelihood -= 0.5 * math.log2(factor) ** 2 / 0.5
            if likelihood > best:
                best, choice = likelihood, scale * factor
        return choice


def _slopes(total: Array, parts: Array) -> Array:
    """Centred columns that the regression terms multiply: the formula's total, then its parts."""
    return np.concatenate([(total - total.mean())[:, None], parts - parts.mean(axis=0)], axis=1)


def distance(a: Problem, b: Problem) -> float:
    """How far apart two problems of one kernel are: mean |log2 ratio| of their sizes."""
    sizes_a, sizes_b = _sizes(a), _sizes(b)
    shared = sizes_a.keys() & sizes_b.keys()
    if not shared:
        return 2.0
    steps = sorted((abs(math.log2(sizes_a[k] / sizes_b[k])) for k in shared), reverse=True)
    # Strides and sizes repeat each other, so the few largest steps describe the change best.
    top = steps[: max(1, len(steps) // 3)]
    other = 0.0 if a.kernel.source_sha256 == b.kernel.source_sha256 else 1.0
    dtypes = {x.name: x.dtype for x in a.arguments} != {x.name: x.dtype for x in b.arguments}
    return sum(top) / len(top) + other + float(dtypes)


def _sizes(problem: Problem) -> dict[str, float]:
    found: dict[str, float] = {}
    for a in problem.arguments:
        if a.kind == "tensor":
            found |= {f"{a.name}[{i}]": float(n) for i, n in enumerate(a.shape) if n > 0}
        elif isinstance(a.value, int) and not isinstance(a.value, bool) and a.value > 0:
            found[a.name] = float(a.value)
    return found


def _failures(
    before: Prior, candidates: Sequence[Candidate], points: Array, measured: Sequence[Measurement]
) -> Array:
    """P(failure) after what was seen: shared memory is monotone, other failures spread to neighbours."""
    p_fail = before.p_fail.copy()
    row = {c: i for i, c in enumerate(candidates)}
    for m in latest(measured).values():
        i = row.get(m.candidate)
        if i is None:
            continue
        if m.ok:
            if before.informed:
                p_fail[before.shared <= before.shared[i]] *= 0.5
            continue
        if m.outcome is Outcome.OUT_OF_RESOURCES and before.informed and before.shared[i] > 0:
            worse = before.shared >= before.shared[i]
            p_fail[worse] = np.maximum(p_fail[worse], 0.95)
        near = np.exp(-((points - points[i]) ** 2).sum(axis=1))
        p_fail = np.maximum(p_fail, 0.9 * near)
    for m in latest(measured).values():
        if m.candidate in row:
            p_fail[row[m.candidate]] = 0.0 if m.ok else 1.0
    return p_fail
