"""Fit the Gaussian process's hyperparameters: type-II maximum likelihood over the corpus.

Rasmussen & Williams 2006, ch. 5.4: the hyperparameters under which all recorded times of all problems,
each problem apart, are likeliest. The residual's scale is integrated over, as the surrogate fits it to
each problem anew. The likelihood is that of `forecast_autotune.surrogates.covariance`, written in torch for
its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.config_encoder import ConfigEncoder
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.covariance import Hyperparameters, forest_proximity
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.protocol import Array, Query
from forecast_train.splits import family_groups, family_of, tables_without
from forecast_train.surrogate.fit import FitError, FitSettings, fit

FITTED_PARAMETERS = (
    *("slope", "additive", "joint", "rough", "forest", "noise"),
    *("additive_scale", "joint_scale", "warp_scale", "stage_scale"),
)
_SCALE_GRID = (0.5, 0.7, 1.0, 1.4, 2.0)
_LEAST, _MOST = 0.003, 20.0
_BATCH = 64
_RATE = 0.05
_JITTER = 1e-9


@dataclass(frozen=True)
class _FastCandidates:
    """One problem's fast candidates."""

    points: Array
    """Coordinates before they are stretched, [n, width]."""
    unit: npt.NDArray[np.intp]
    """Per coordinate: 1 where it counts warps, 2 stages, else 0."""
    slopes: Array
    warp_doublings: Array
    """As `CovarianceInputs` has them, [n]."""
    alike: Array
    """Share of leaves in common, [n, n]."""
    residual: Array


def fit_hyper(
    tables: Sequence[Table],
    surrogate: Callable[[Table], AnalyticSurrogate],
    *,
    start: Hyperparameters | None = None,
    rounds: int = 12,
    rows: int = 64,
    seed: int = 0,
    progress: Callable[[int, int, str], object] | None = None,
) -> tuple[Hyperparameters, float]:
    """Hyperparameters and their mean log likelihood per observation, by `rounds` passes of Adam.

    `surrogate(table)` is what forecasts a table: fitted without its family, or its trees have seen the
    residuals that they are to explain. At most `rows` candidates of a problem count, the fast ones first.
    Raises `FitError` when no table has IR and times, or without torch.
    """
    try:
        import torch
    except ImportError as missing:
        raise FitError(f"fitting hyperparameters needs torch: pip install torch ({missing})") from missing
    first = start or surrogate(tables[0]).hyper
    lists = [result for t in tables if (result := _fast_candidates(t, surrogate(t), rows)) is not None]
    if not lists:
        raise FitError(f"none of {len(tables)} tables has TTIR, grids and times")
    everything = _padded(lists)
    logs = {
        name: torch.tensor(np.log(np.clip(value, _LEAST, _MOST)), requires_grad=True)
        for name, value in _fitted_values(first).items()
    }
    everything["warp_doublings"] *= first.warp_trend  # fitted beside it: see `LEARNED_HYPERPARAMETERS`
    optimiser = torch.optim.Adam(list(logs.values()), lr=_RATE)
    generator = torch.Generator().manual_seed(seed)
    batches = math.ceil(len(lists) / _BATCH)
    for step in range(rounds * batches):
        if progress is not None:
            progress(step, rounds * batches, "steps")
        optimiser.param_groups[0]["lr"] = _RATE * min(1.0, 2.0 * (1.0 - step / (rounds * batches)))
        drawn = torch.randperm(len(lists), generator=generator)[:_BATCH]
        loss = -_likelihood({k: v[drawn] for k, v in everything.items()}, logs, first.intercept).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        with torch.no_grad():
            for value in logs.values():
                value.clamp_(math.log(_LEAST), math.log(_MOST))
    with torch.no_grad():
        parts = [{k: v[i : i + _BATCH] for k, v in everything.items()} for i in range(0, len(lists), _BATCH)]
        final = torch.cat([_likelihood(part, logs, first.intercept) for part in parts]).mean()
    return _with_values(first, {k: np.exp(v.detach().numpy()) for k, v in logs.items()}), float(final)


def fit_all(
    tables: Sequence[Table],
    *,
    groups: int = 6,
    seed: int = 0,
    recipe: FitSettings | None = None,
    progress: Callable[[int, int, str], object] | None = None,
) -> tuple[Hyperparameters, float]:
    """`fit_hyper` on surrogates that were each fitted without a group of families, for the whole corpus.

    Nor with a kernel of the group that counts among another family as well. Raises `FitError` when that
    leaves nothing to fit a surrogate to.
    """
    held = family_groups(tables, groups)
    if len(held) < 2:
        families = sorted({family_of(t.problem) for t in tables})
        raise FitError(f"hyperparameters need tables of two families or more, these are of {families}")
    forecaster: dict[str, AnalyticSurrogate] = {}
    for number, group in enumerate(held):
        if progress is not None:
            progress(number, len(held), "groups of families left out")
        apart = tables_without(tables, group)
        if not apart:
            held_out = sorted({family_of(t.problem) for t in group})
            raise FitError(f"hyperparameters need kernels that are not of {held_out}, and there are none")
        learned = fit(apart, seed=seed, recipe=recipe)
        forecaster |= dict.fromkeys((t.problem.id for t in group), learned)
    return fit_hyper(tables, lambda t: forecaster[t.problem.id], seed=seed, progress=progress)


def _fitted_values(hyper: Hyperparameters) -> dict[str, Array]:
    return {name: np.array(getattr(hyper, name), dtype=float) for name in (*FITTED_PARAMETERS, "part_slopes")}


def _with_values(first: Hyperparameters, values: Mapping[str, Array]) -> Hyperparameters:
    plain = {name: float(values[name]) for name in FITTED_PARAMETERS}
    return replace(first, **plain, part_slopes=tuple(float(v) for v in values["part_slopes"]))


def _fast_candidates(table: Table, surrogate: AnalyticSurrogate, rows: int) -> _FastCandidates | None:
    query = Query(table.problem, list(table.by_candidate()), table.grids(), ttir=table.problem.ttir)
    before = surrogate.prior(query)
    times = np.array(table.log2_ms())
    ran = np.flatnonzero(np.isfinite(times))
    if not before.informed or len(ran) < 3:
        return None
    ran = ran[np.argsort(times[ran], kind="stable")][:rows]
    encoder = ConfigEncoder.of(query.candidates)
    inputs, believed = surrogate.inputs(query.candidates, before, encoder)
    points = encoder(query.candidates)
    unit = np.zeros(points.shape[1], dtype=np.intp)
    for place, (name, _) in enumerate(encoder.numeric):
        unit[place] = {"num_warps": 1, "num_stages": 2}.get(name, 0)
    seen = surrogate.hyper.compress(times[ran], float(np.nanmin(times)))
    leaves = inputs.leaves[ran]
    return _FastCandidates(
        points[ran],
        unit,
        inputs.slopes[ran],
        inputs.warp_doublings[ran],
        forest_proximity(leaves, leaves),
        seen - believed[ran],
    )


def _padded(data: Sequence[_FastCandidates]) -> dict[str, Any]:
    """All problems as tensors of one shape; `there` is 1 for what is not padding."""
    import torch

    most = max(len(d.residual) for d in data)
    width = max(d.points.shape[1] for d in data)
    shapes = {
        "points": (most, width),
        "dimension": (width,),
        "counts_warps": (width,),
        "counts_stages": (width,),
        "slopes": (most, data[0].slopes.shape[1]),
        "warp_doublings": (most,),
        "alike": (most, most),
        "residual": (most,),
        "there": (most,),
    }
    results = {name: np.zeros((len(data), *shape)) for name, shape in shapes.items()}
    for i, d in enumerate(data):
        n, w = d.points.shape
        results["points"][i, :n, :w] = d.points
        results["dimension"][i, :w] = 1.0
        results["counts_warps"][i, :w], results["counts_stages"][i, :w] = d.unit == 1, d.unit == 2
        results["slopes"][i, :n], results["alike"][i, :n, :n] = d.slopes, d.alike
        results["warp_doublings"][i, :n] = d.warp_doublings
        results["residual"][i, :n], results["there"][i, :n] = d.residual, 1.0
    return {name: torch.tensor(array) for name, array in results.items()}


def _likelihood(data: Mapping[str, Any], logs: Mapping[str, Any], intercept: float) -> Any:
    """Log likelihood per observation of each problem, [problems], the scale integrated over."""
    import torch

    h = {name: value.exp() for name, value in logs.items()}
    there = data["there"]
    residual, tilt = _covariance(data, h)
    both = there[:, :, None] * there[:, None, :]
    diagonal = torch.diag_embed(h["noise"] ** 2 * there + (1.0 - there) + _JITTER)
    results = []
    for scale in _SCALE_GRID:
        root = torch.linalg.cholesky((scale**2 * residual + tilt + intercept**2) * both + diagonal)
        white = torch.linalg.solve_triangular(root, data["residual"][:, :, None], upper=False)[:, :, 0]
        fit = -0.5 * (white**2).sum(dim=1) - torch.log(torch.diagonal(root, dim1=1, dim2=2)).sum(dim=1)
        results.append(fit - math.log2(scale) ** 2)
    return torch.logsumexp(torch.stack(results), dim=0) / there.sum(dim=1)


def _covariance(data: Mapping[str, Any], h: Mapping[str, Any]) -> tuple[Any, Any]:
    """The residual's and the slopes' covariance, as `Covariance.residual` and `.tilt`, [problems, n, n]."""
    import torch

    stretch = 1.0 + data["counts_warps"] * (h["warp_scale"] - 1.0)
    stretch = stretch + data["counts_stages"] * (h["stage_scale"] - 1.0)
    points = data["points"] / stretch[:, None, :]
    step = (points[:, :, None, :] - points[:, None, :, :]) ** 2
    dimension = data["dimension"][:, None, None, :]
    one = (torch.exp(-0.5 * step / h["additive_scale"] ** 2) * dimension).sum(dim=-1)
    residual = h["additive"] ** 2 * one / dimension.sum(dim=-1)
    far = step.sum(dim=-1)
    residual = residual + h["joint"] ** 2 * torch.exp(-0.5 * far / h["joint_scale"] ** 2)
    residual = residual + h["rough"] ** 2 * (far < 1e-9) + h["forest"] ** 2 * data["alike"]
    weights = torch.cat([h["slope"][None], h["part_slopes"]]) ** 2
    tilt = (data["slopes"] * weights) @ data["slopes"].transpose(1, 2)
    doublings = data["warp_doublings"]
    tilt = tilt + doublings[:, :, None] * doublings[:, None, :]
    return residual, tilt
