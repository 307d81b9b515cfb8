"""Scores against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from forecast_train import metrics as m
from forecast_train.metrics import cluster_bootstrap, paired_bootstrap

NAN = math.nan


def test_spearman() -> None:
    a = np.array([1.0, 2.0, 3.0, 4.0])
    assert m.spearman(a, a**3) == pytest.approx(1.0)
    assert m.spearman(a, -a) == pytest.approx(-1.0)
    # Ranks 1 2 3 4 against 2 1 4 3: 1 - 6 * 4 / (4 * 15).
    assert m.spearman(a, np.array([2.0, 1.0, 9.0, 3.0])) == pytest.approx(0.6)
    # Ranks 1.5 1.5 3 against 1 2 3: 1.5 / sqrt(1.5 * 2).
    assert m.spearman(np.array([5.0, 5.0, 7.0]), a[:3]) == pytest.approx(math.sqrt(0.75))
    assert m.spearman(np.ones(4), a) == 0.0
    assert math.isnan(m.spearman(a[:1], a[:1]))


def test_regret_of_an_order() -> None:
    times = np.log2([4.0, 1.0, 2.0, 8.0])
    path = m.regret_path(np.array([3, 0, 2, 1]), times)
    np.testing.assert_allclose(path, [7.0, 3.0, 1.0, 0.0])
    assert m.regret_at(path, 3) == pytest.approx(1.0)
    assert m.regret_at(path, 99) == 0.0


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


def test_the_mean_of_regrets_is_geometric() -> None:
    assert m.geomean_regret(np.array([0.0, 3.0])) == pytest.approx(1.0)  # sqrt(1 * 4) - 1


def test_a_bootstrap_draws_whole_clusters() -> None:
    values = np.array([0.0] * 50 + [1.0] * 50)
    few = cluster_bootstrap(lambda rows: float(values[rows].mean()), ["a"] * 50 + ["b"] * 50)
    many = cluster_bootstrap(lambda rows: float(values[rows].mean()), [str(i) for i in range(100)])
    assert few.value == many.value == 0.5
    assert (few.low, few.high) == (0.0, 1.0)  # two kernels: either may be missing
    assert 0.35 < many.low < 0.45 < 0.55 < many.high < 0.65  # 0.5 +- 1.96 * 0.05
    assert (few.rows, few.clusters) == (100, 2)


def test_one_cluster_has_no_interval_and_is_above_nothing() -> None:
    alone = cluster_bootstrap(lambda rows: 1.0, ["a", "a"])
    assert math.isnan(alone.low)
    low, high = m.BootstrapInterval(0.5, 0.0, 0.9, 5, 5), m.BootstrapInterval(9.0, 8.0, 10.0, 5, 5)
    assert high.above(low)
    assert not low.above(high)
    assert not alone.above(low)
    assert not high.above(alone)


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
