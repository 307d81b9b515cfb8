"""Weights of advice follow what recorded times say of it."""

from __future__ import annotations

import numpy as np
import pytest

from forecast_autotune.surrogates.advised import AdviceWeights
from forecast_autotune.surrogates.covariance import CovarianceInputs, Hyperparameters
from forecast_train.surrogate.advice_weights import AdviceEvidence, fit_advice_weights, log_likelihood


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


def test_true_advice_is_likelier_than_none() -> None:
    evidence = _evidence(3, 0.8)
    assert log_likelihood(evidence, AdviceWeights(mean=0.8)) > log_likelihood(
        evidence, AdviceWeights(mean=0.0)
    )


def test_weights_need_evidence() -> None:
    with pytest.raises(ValueError, match="at least one problem"):
        fit_advice_weights([])
