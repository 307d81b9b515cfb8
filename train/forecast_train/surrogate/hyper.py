"""Fit the Gaussian process's hyperparameters: type-II maximum likelihood over the corpus.

Rasmussen & Williams 2006, ch. 5.4: the hyperparameters under which all recorded times of all problems,
each problem apart, are likeliest. The residual's scale is integrated over, as the surrogate fits it to
each problem anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from forecast_autotune.features.cost import PARTS
from forecast_autotune.surrogates.analytic import Analytic
from forecast_autotune.surrogates.base import Array, Query
from forecast_autotune.surrogates.covariance import Covariance, Hyper, Inputs
from forecast_autotune.table import Table
from forecast_train.surrogate.errors import FitError

FITTED = ("slope", "additive", "joint", "rough", "forest", "noise", "additive_scale", "joint_scale")
_SCALES = (0.5, 0.7, 1.0, 1.4, 2.0)
_BOUNDS = (0.003, 20.0)


@dataclass(frozen=True)
class _Observed:
    inputs: Inputs
    residual: Array


def fit_hyper(
    tables: Sequence[Table],
    surrogate: Callable[[Table], Analytic],
    *,
    start: Hyper | None = None,
    rounds: int = 15,
    rows: int = 64,
) -> tuple[Hyper, float]:
    """Hyperparameters and their mean log likelihood per observation.

    `surrogate(table)` is what forecasts a table: fitted without its family, or its forest has seen the
    residuals that it is to explain. At most `rows` candidates of a problem count, the fast ones first.
    Raises `FitError` when no table has IR and times.
    """
    from scipy.optimize import minimize  # comes with scikit-learn

    first = start or surrogate(tables[0]).hyper
    data = [found for t in tables if (found := _observed(t, surrogate(t), rows)) is not None]
    if not data:
        raise FitError(f"none of {len(tables)} tables has TTIR, grids and times")

    def loss(values: Array) -> float:
        hyper = _with(first, values)
        return -float(np.mean([_likelihood(d, hyper) for d in data]))

    begin = np.log([max(v, 0.01) for v in _values(first)])
    bounds = [(math.log(_BOUNDS[0]), math.log(_BOUNDS[1]))] * len(begin)
    found = minimize(loss, begin, method="L-BFGS-B", bounds=bounds, options={"maxiter": rounds})
    return _with(first, found.x), -float(found.fun)


def _values(hyper: Hyper) -> list[float]:
    return [*(getattr(hyper, name) for name in FITTED), *hyper.part_slopes]


def _with(hyper: Hyper, logs: Array) -> Hyper:
    values = [float(v) for v in np.exp(logs)]
    named = dict(zip(FITTED, values, strict=False))
    return replace(hyper, **named, part_slopes=tuple(values[-len(PARTS) :]))


def _observed(table: Table, surrogate: Analytic, rows: int) -> _Observed | None:
    query = Query(table.problem, list(table.by_candidate()), table.grids(), ttir=table.problem.ttir)
    before = surrogate.before(query)
    times = np.array(table.log2_ms())
    ran = np.flatnonzero(np.isfinite(times))
    if not before.informed or len(ran) < 3:
        return None
    ran = ran[np.argsort(times[ran], kind="stable")][:rows]
    inputs, believed = surrogate.inputs(query.candidates, before)
    seen = surrogate.hyper.compress(times[ran], float(np.nanmin(times)))
    return _Observed(inputs[ran], seen - believed[ran])


def _likelihood(data: _Observed, hyper: Hyper) -> float:
    """Log likelihood per observation, the residual's scale integrated over a log-normal prior."""
    covariance = Covariance(hyper)
    residual, tilt = covariance.residual(data.inputs, data.inputs), covariance.tilt(data.inputs, data.inputs)
    found = []
    for scale in _SCALES:
        matrix = scale**2 * residual + tilt + hyper.intercept**2
        matrix[np.diag_indices_from(matrix)] += hyper.noise**2
        try:
            root = np.linalg.cholesky(matrix)
        except np.linalg.LinAlgError:
            return -1e3
        white = np.linalg.solve(root, data.residual)
        fit = -0.5 * float(white @ white) - float(np.log(np.diag(root)).sum())
        found.append(fit - math.log2(scale) ** 2)
    return float(np.logaddexp.reduce(found)) / len(data.residual)
