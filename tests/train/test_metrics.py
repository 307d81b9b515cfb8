"""Scores against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from forecast_train import metrics as m
from forecast_train.metrics import cluster_bootstrap, paired_bootstrap

NAN = math.nan


def test_a_failure_never_wins_and_all_failed_is_charged_the_worst_time() -> None:
    times = np.array([NAN, 1.0, NAN, 0.0, 3.0])
    path = m.regret_path(np.array([0, 2, 1, 3, 4]), times)
    np.testing.assert_allclose(path, [7.0, 7.0, 1.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="all failed"):
        m.regret_path(np.array([0]), np.array([NAN]))
    with pytest.raises(ValueError, match="at least 1"):
        m.regret_at(path, 0)


def test_calibration_errors() -> None:
    p = np.array([0.05, 0.05, 0.95, 1.0])
    happened = np.array([False, True, True, True])
    sums = m.bin_sums(p, happened)
    # Bin 0: stated 0.05, observed 0.5; bin 9: stated 0.975, observed 1. Half of the cases each.
    assert m.ece_of(sums) == pytest.approx(0.5 * 0.45 + 0.5 * 0.025)
    assert [(b.n, b.stated, b.observed) for b in m.reliability_of(sums)] == [
        (2.0, pytest.approx(0.05), 0.5),
        (2.0, pytest.approx(0.975), 1.0),
    ]
    np.testing.assert_allclose(m.bin_sums(p[:1], happened[:1]) + m.bin_sums(p[1:], happened[1:]), sums)


def test_paired_differences_are_sharper() -> None:
    generator = np.random.default_rng(0)
    hard = generator.exponential(1.0, 40)
    mine, theirs = hard, hard + 0.05
    kernels = [str(i) for i in range(40)]
    difference = paired_bootstrap(lambda v: float(v.mean()), theirs, mine, kernels)
    assert difference.low > 0
    assert difference.value == pytest.approx(0.05)
    apart = [cluster_bootstrap(lambda rows, v=v: float(v[rows].mean()), kernels) for v in (mine, theirs)]
    assert not apart[1].above(apart[0])
    with pytest.raises(ValueError, match="equally many rows"):
        paired_bootstrap(lambda v: 0.0, mine, theirs[1:], kernels)
