"""Weights of advice are those that recorded times bear out."""

from __future__ import annotations

import numpy as np
import pytest

from forecast_autotune.surrogates.covariance import CovarianceInputs, Hyperparameters
from forecast_train.surrogate.advice_weights import AdviceEvidence, fit_advice_weights


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
