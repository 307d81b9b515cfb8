"""Hyperparameters for a corpus: who forecasts what, and that torch sees the covariance that numpy does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.covariance import (
    Covariance,
    CovarianceInputs,
    Hyperparameters,
    forest_proximity,
)
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_train.splits import kernel_identities
from forecast_train.surrogate import hyperparameters
from forecast_train.surrogate.advice_weights import AdviceEvidence, fit_advice_weights
from forecast_train.surrogate.fit import FitSettings

SMALL = FitSettings(trees=12, leaf=8, rounds=60, rate=0.2, jobs=1)
FAMILIES = {"transpose_kernel": "layout", "swiglu_kernel": "activation", "online_softmax": "reduction"}


@cache
def tables() -> tuple[Table, ...]:
    """Two problems of each of three kernels, each a family; one of the softmax's is filed under another."""
    results = []
    for name, family in FAMILIES.items():
        two = [t for t in load(shipped_tables()) if t.problem.kernel.name == name][:2]
        results += [filed(t, family) for t in two]
    return (*results[:-1], filed(results[-1], "attention"))


def filed(table: Table, family: str) -> Table:
    problem = replace(table.problem, extra={**table.problem.extra, "family": family})
    return Table(problem, table.measurements)


def test_no_surrogate_forecasts_a_kernel_that_it_was_fitted_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the kernel stands under two families."""
    fitted_to: dict[AnalyticSurrogate, Sequence[Table]] = {}
    forecast_by: dict[str, AnalyticSurrogate] = {}
    fit, fit_hyper = hyperparameters.fit, hyperparameters.fit_hyper

    def noting(given: Sequence[Table], **options: Any) -> AnalyticSurrogate:
        value = fit(given, **options)
        fitted_to[value] = given
        return value

    def asking(
        given: Sequence[Table], surrogate: Callable[[Table], AnalyticSurrogate], **options: Any
    ) -> Any:
        forecast_by.update({t.problem.id: surrogate(t) for t in given})
        return fit_hyper(given, surrogate, **options)

    monkeypatch.setattr(hyperparameters, "fit", noting)
    monkeypatch.setattr(hyperparameters, "fit_hyper", asking)
    steps: list[tuple[int, int, str]] = []
    result, likelihood = hyperparameters.fit_all(
        tables(), recipe=SMALL, progress=lambda *step: steps.append(step)
    )
    assert all(done < total for done, total, _ in steps)
    assert {what for *_, what in steps} == {"groups of families left out", "steps"}
    assert np.isfinite(likelihood)
    assert result != SMALL.hyper
    assert len(fitted_to) == 4, "one per family"
    for table in tables():
        known = {i for t in fitted_to[forecast_by[table.problem.id]] for i in kernel_identities(t.problem)}
        assert known
        assert not known & kernel_identities(table.problem)


def observed(
    draw: np.random.Generator, n: int, width: int
) -> tuple[hyperparameters._FastCandidates, CovarianceInputs]:
    """A problem with some configs that are alike; the inputs' points are as yet unstretched."""
    points = draw.integers(0, 5, (n, width)).astype(float)
    points[-2:] = points[:2]
    unit = draw.permutation([1, 2, *[0] * (width - 2)]).astype(np.intp)
    leaves = draw.integers(0, 3, (n, 6), dtype=np.int32)
    inputs = CovarianceInputs(points, draw.normal(size=(n, 8)), leaves, draw.normal(size=n))
    alike = forest_proximity(inputs.leaves, inputs.leaves)
    seen = hyperparameters._FastCandidates(
        points, unit, inputs.slopes, inputs.warp_doublings, alike, draw.normal(size=n)
    )
    return seen, inputs


@pytest.mark.parametrize("seed", range(5))
def test_the_covariance_in_torch_is_that_of_the_surrogate(seed: int) -> None:
    draw = np.random.default_rng(seed)
    values = {name: float(draw.uniform(0.2, 2.0)) for name in hyperparameters.FITTED_PARAMETERS}
    weights = Hyperparameters(
        **values,
        part_slopes=tuple(draw.uniform(0.2, 2.0, 7).tolist()),
        warp_trend=float(draw.uniform(0.2, 2.0)),
    )
    problems = [observed(draw, n, width) for n, width in ((9, 4), (6, 3), (12, 5))]
    h = {name: torch.tensor(value) for name, value in hyperparameters._fitted_values(weights).items()}
    data = hyperparameters._padded([seen for seen, _ in problems])
    data["warp_doublings"] *= weights.warp_trend
    residual, tilt = hyperparameters._covariance(data, h)
    for i, (seen, inputs) in enumerate(problems):
        n = len(inputs)
        stretch = np.choose(seen.unit, [1.0, weights.warp_scale, weights.stage_scale])
        stretched = replace(inputs, points=inputs.points / stretch)
        plain = Covariance(weights)
        np.testing.assert_allclose(residual[i, :n, :n], plain.residual(stretched, stretched), rtol=1e-9)
        np.testing.assert_allclose(
            tilt[i, :n, :n], plain.slope_terms(stretched, stretched), rtol=1e-9, atol=1e-12
        )


# --- weights of advice ---


def _evidence(kernel: int, truth: float) -> AdviceEvidence:
    """A problem whose surprise is `truth` times the disagreement, and a little noise."""
    generator = np.random.default_rng(kernel)
    n = 12
    shifts = generator.normal(0, 0.5, (n, 1))
    surprise = truth * shifts[:, 0] + generator.normal(0, 0.05, n)
    leaves = np.arange(n, dtype=np.int32)[:, None]
    inputs = CovarianceInputs(generator.normal(0, 3, (n, 2)), np.zeros((n, 8)), leaves, np.zeros(n))
    hyper = Hyperparameters(additive=0.1, joint=0.1, rough=0.05)
    none = np.zeros((n, 0))
    return AdviceEvidence(f"k{kernel}", "f", hyper, inputs, surprise, shifts, none, none)


@pytest.mark.parametrize(("truth", "low", "high"), [(0.8, 0.6, 1.0), (0.0, 0.0, 0.1)])
def test_the_weight_is_what_the_times_bear_out(truth: float, low: float, high: float) -> None:
    result = fit_advice_weights([_evidence(kernel, truth) for kernel in range(20)])
    assert low <= result.mean <= high
