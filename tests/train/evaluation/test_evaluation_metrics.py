"""Scores against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from forecast_train.evaluation import metrics as m
from forecast_train.evaluation.bootstrap import cluster_bootstrap, paired_bootstrap

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
    assert m.measurements_needed(path, 1.0) == 3
    assert m.measurements_needed(path[:2], 0.05) is None


def test_a_failure_never_wins_and_all_failed_is_charged_the_worst_time() -> None:
    times = np.array([NAN, 1.0, NAN, 0.0, 3.0])
    path = m.regret_path(np.array([0, 2, 1, 3, 4]), times)
    np.testing.assert_allclose(path, [7.0, 7.0, 1.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="all failed"):
        m.regret_path(np.array([0]), np.array([NAN]))
    with pytest.raises(ValueError, match="at least 1"):
        m.regret_at(path, 0)


def test_auroc() -> None:
    score = np.array([0.9, 0.8, 0.7, 0.1])
    # Pairs (positive, negative): 0.9 above both, 0.7 above 0.1 only: 3 of 4.
    assert m.auroc(score, np.array([True, False, True, False])) == pytest.approx(0.75)
    assert m.auroc(np.ones(4), np.array([True, False, True, False])) == pytest.approx(0.5)
    assert math.isnan(m.auroc(score, np.ones(4, dtype=bool)))


def test_calibration_errors() -> None:
    p = np.array([0.05, 0.05, 0.95, 1.0])
    happened = np.array([False, True, True, True])
    # Bin 0: stated 0.05, observed 0.5; bin 9: stated 0.975, observed 1. Half of the cases each.
    assert m.ece(p, happened) == pytest.approx(0.5 * 0.45 + 0.5 * 0.025)
    assert m.brier(p, happened) == pytest.approx((0.05**2 + 0.95**2 + 0.05**2 + 0.0) / 4)
    table = m.reliability_of(m.bin_sums(p, happened, m.width_bins(p), 10))
    assert [(b.n, b.stated, b.observed) for b in table] == [
        (2.0, pytest.approx(0.05), 0.5),
        (2.0, pytest.approx(0.975), 1.0),
    ]


def test_equal_counts_keep_equal_values_together() -> None:
    p = np.array([0.1, 0.2, 0.3, 0.4])
    happened = np.array([False, False, True, True])
    # Two bins: stated 0.15 and 0.35, observed 0 and 1.
    assert m.ece(p, happened, bins=2, equal_count=True) == pytest.approx(0.5 * 0.15 + 0.5 * 0.65)
    constant = np.full(10, 0.5)
    assert m.ece(constant, np.arange(10) < 5, equal_count=True) == pytest.approx(0.0)


def test_sums_of_parts_give_the_error_of_the_whole() -> None:
    generator = np.random.default_rng(0)
    p = generator.random(200)
    happened = generator.random(200) < p**2
    parts = [m.bin_sums(p[i], happened[i], m.width_bins(p[i]), 10) for i in (slice(0, 70), slice(70, 200))]
    assert m.ece_of(parts[0] + parts[1]) == pytest.approx(m.ece(p, happened))


def test_crps() -> None:
    one, truth = np.ones(1), np.zeros(1)
    # At the centre of a standard normal: 2 phi(0) - 1 / sqrt(pi).
    centre = 2 / math.sqrt(2 * math.pi) - 1 / math.sqrt(math.pi)
    assert m.crps_gaussian(truth, one, truth)[0] == pytest.approx(centre)
    assert m.crps_gaussian(truth, 3 * one, truth)[0] == pytest.approx(3 * centre)
    assert m.crps_gaussian(2 * one, 0 * one, truth)[0] == pytest.approx(2.0)
    # Samples 0 and 2 against 1: E|X - y| = 1, E|X - X'| = 1.
    assert m.crps_samples(np.array([[0.0], [2.0]]), one)[0] == pytest.approx(0.5)
    drawn = np.random.default_rng(1).standard_normal((20000, 1)) * 0.5 + 1.0
    exact = m.crps_gaussian(one, 0.5 * one, truth)[0]
    assert m.crps_samples(drawn, truth)[0] == pytest.approx(exact, abs=0.02)


def test_interval_coverage() -> None:
    truth = np.array([0.0, 0.5, 1.0, 3.0])
    samples = np.linspace(-1, 1, 101)[:, None] * np.ones(4)
    assert m.sample_coverage(samples, truth, 0.9) == 0.5  # within [-0.9, 0.9]


def test_risk_coverage() -> None:
    confidence, loss = np.array([0.9, 0.1, 0.5, 0.7]), np.array([0.0, 1.0, 1.0, 0.0])
    coverage, risk = m.risk_coverage(confidence, loss)
    np.testing.assert_allclose(coverage, [0.25, 0.5, 0.75, 1.0])
    np.testing.assert_allclose(risk, [0.0, 0.0, 1 / 3, 0.5])
    assert m.aurc(confidence, loss) == pytest.approx((1 / 3 + 0.5) / 4)
    for turned in (loss, loss[::-1]):  # without a preference, the order of listing must not count
        np.testing.assert_allclose(m.risk_coverage(np.ones(4), turned)[1], 0.5)


def test_summaries_of_regrets() -> None:
    regrets = np.array([0.0, 3.0])
    assert m.geomean_regret(regrets) == pytest.approx(1.0)  # sqrt(1 * 4) - 1
    assert m.share_beyond(np.array([0.02, 0.021, 0.5, 0.0]), 0.02) == 0.5
    assert m.p95(np.arange(101.0)) == pytest.approx(95.0)


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
