"""Forecasts of sources: distributions, fits that leave a family out, scores of orders, packed answers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib.variants.source_answers import SourceAnswer, pack_answers, read_answers
from benchmarks.lib.variants.source_comparisons import EIGHT_BINS, bin_probabilities
from benchmarks.lib.variants.source_models import (
    LEVELS,
    StudentForecasts,
    common_shift,
    fit_mean,
    forecasts_without_family,
    logistic_without_family,
    trees_without_family,
)
from benchmarks.lib.variants.source_orders import early_gain, scores_without_family, weight_choices
from benchmarks.lib.variants.source_outcomes import author_of, change_share
from benchmarks.lib.variants.source_scores import (
    KernelForecasts,
    by_figure,
    differences,
    figures,
    kernel_scores,
    random_scores,
)

SAID = StudentForecasts(np.array([-0.1, 0.2]), np.array([0.05, 0.02]), np.array([0.2, 0.02]), 3.0)
RNG = np.random.default_rng(0)
FAMILIES = [f"f{i % 4}" for i in range(160)]
X = RNG.normal(size=(160, 2))
Y = 0.5 * X[:, 0] + 0.05 * RNG.standard_t(3, size=160)


def test_two_scales_are_one_distribution() -> None:
    grid = np.linspace(-60.0, 60.0, 240_001)
    for i in range(2):
        one = SAID.rows(np.array([i]))
        wide = (np.repeat(v, len(grid)) for v in (one.mode, one.faster, one.slower))
        density = np.exp(StudentForecasts(*wide, 3.0).log_density(grid))
        assert np.trapezoid(density, grid) == pytest.approx(1.0, abs=1e-3)
    levels = np.array([0.05, 0.3, 0.5, 0.9])
    for place, row in enumerate(SAID.quantiles(levels).T):
        assert SAID.below(row)[place] == pytest.approx(levels)
    assert SAID.centre[0] > SAID.mode[0], "slower is likelier than faster"
    drawn = SAID.quantiles(LEVELS)
    apart = np.abs(drawn[:, None] - drawn[None]).mean(axis=(0, 1)) / 2
    assert SAID.crps(np.zeros(2)) == pytest.approx(np.abs(drawn).mean(axis=0) - apart)


def test_bins_share_what_works() -> None:
    p = bin_probabilities(SAID.below(EIGHT_BINS.edges), np.array([0.1, 0.0]))
    assert p.shape == (2, 9)
    assert p.sum(axis=1) == pytest.approx(1.0)
    assert p[:, -1].tolist() == [0.1, 0.0]


def test_no_forecast_counts_against_itself() -> None:
    said = fit_mean(np.column_stack([X[:, 0], -X[:, 0]]), Y)
    assert said(np.array([[1.0, 0.0]])) - said(np.zeros((1, 2))) == pytest.approx(0.5, abs=0.1)
    assert said(np.array([[0.0, 1.0]])) == pytest.approx(said(np.zeros((1, 2))))


def test_nothing_of_a_family_is_in_its_own_forecasts() -> None:
    own = np.array(FAMILIES) == "f1"
    other = np.where(own, RNG.normal(size=160), Y)
    rows = [np.arange(i, 160, 16) for i in range(16)]
    choices = weight_choices(2, False)
    for truth in (Y, other):
        mean, said = forecasts_without_family(X, np.abs(X), truth, FAMILIES)
        assert math.isfinite(said.freedom)
        score, _ = scores_without_family(X, choices, truth, rows, FAMILIES)
        trees = trees_without_family(X, truth, FAMILIES)[1]
        chance = logistic_without_family(X, truth > 0, FAMILIES)
        found = np.stack([mean, said.mode, said.faster, said.slower, score, trees, chance])[:, own]
        if truth is Y:
            before, trees_of_others = found, trees
    assert np.array_equal(before, found)
    assert np.array_equal(trees_of_others, trees), "others' trees have not seen it either"
    assert np.corrcoef(before[0], Y[own])[0, 1] > 0.95


def test_weights_are_those_that_find_fast_sources() -> None:
    rows = [np.arange(i, 160, 16) for i in range(16)]
    columns = np.column_stack([X[:, 1], Y])
    _, weights = scores_without_family(columns, weight_choices(2, False), Y, rows, FAMILIES)
    assert all(own[1] >= 0.6 for own in weights)
    assert early_gain(np.array([2.0, 1.0]), np.array([-0.3, math.nan])) == pytest.approx(0.15)


def one(truth: list[float], said: list[float]) -> KernelForecasts:
    zeros = np.zeros(len(truth))
    return KernelForecasts(np.array(truth), np.array(said), -np.array(said), zeros, zeros)


def test_scores_of_a_kernel() -> None:
    truth = [-0.4, 0.1, 0.3, math.nan]
    good = kernel_scores(one(truth, [-0.1, 0.0, 0.1, 0.2]))
    assert good["spearman"] == (1.0, 1.0)
    assert good["pairs"] == (3.0, 3.0)
    assert good["recovered"] == (0.4, 0.4)
    assert good["near"] == (1.0, 1.0)
    bad = kernel_scores(one(truth, [0.2, 0.1, 0.0, -0.1]))
    assert (bad["recovered"][0], bad["pairs"][0], bad["three"][0]) == (0.0, 0.0, 0.0)
    assert bad["far"] == (0.0, 1.0)
    lot = random_scores(np.array(truth), 0)
    assert lot["recovered"][0] == pytest.approx(0.1, abs=0.03)


def test_intervals_are_over_kernels_and_differences_are_paired() -> None:
    good = by_figure([kernel_scores(one([-0.4 - 0.1 * i, 0.1], [-0.1, 0.0])) for i in range(8)])
    bad = by_figure([kernel_scores(one([-0.4 - 0.1 * i, 0.1], [0.0, -0.1])) for i in range(8)])
    assert figures(good)["recovered"] == [1.0, 1.0, 1.0]
    assert differences(good, bad)["recovered"] == [1.0, 1.0, 1.0]
    assert differences(good, good)["three"] == [0.0, 0.0, 0.0]
    value, low, high = figures(good)["first"]
    assert (low or 0.0) < (value or 0.0) < (high or 0.0)


def test_what_sources_have_in_common_is_shrunk() -> None:
    said = StudentForecasts(np.zeros(4), np.full(4, 0.1), np.full(4, 0.1), 5.0)
    measured = np.array([True, True, False, True])
    shift = common_shift(said, measured, np.array([0.1, 0.1, 9.0, math.nan]), 0.1)
    assert shift == pytest.approx(0.1 * 200 / 300)
    assert common_shift(said, ~measured, np.full(4, math.nan), 0.1) == 0.0


def test_packed_answers_are_read_again(tmp_path: Path) -> None:
    for folder in ("q", "answers"):
        (tmp_path / folder).mkdir()
    (tmp_path / "q" / "k.md").write_text("How fast?")
    said = {
        "log2_ratio": [0, -0.1],
        "sd": [0.1, 0.2],
        "p_wrong": [0.01, 0.5],
        "why": ["same", "fewer passes"],
    }
    (tmp_path / "answers" / "k.json").write_text(json.dumps(said))
    index = {"k": ["k/01_a", "k/hoist-1"], "unanswered": ["unanswered/01_a"]}
    assert pack_answers(tmp_path, index, {"model": "m"}, tmp_path / "a.gz") == 2
    about, found = read_answers(tmp_path / "a.gz")
    assert about == {"model": "m"}
    assert found["k/hoist-1"] == SourceAnswer(-0.1, 0.2, 0.5, "fewer passes")
    with pytest.raises(ValueError, match="3 sources were asked about"):
        pack_answers(tmp_path, {"k": ["a", "b", "c"]}, {}, tmp_path / "b.gz")


def test_authors_and_edits() -> None:
    first = frozenset({"softmax"})
    names = ("softmax/01_a", "gram/01_a", "softmax/hoist-12ab")
    assert [author_of(n, first) for n in names] == ["first model", "later model", "mechanical"]
    assert change_share("a\nb\nc\nd", "a\nb\nc\nd") == 0.0
    assert change_share("a\nb\nc\nd", "a\nb\nc\ne") == pytest.approx(0.25)
