"""The paper's metrics, against values computed by hand, and the defect of its reference implementation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecast_autotune.llm.bins import BINS, Bins
from forecast_autotune.llm.prompt import ProblemDescription, ReferenceTime, forecast_prompt
from forecast_autotune.surrogates.protocol import Forecasts
from forecast_autotune.testing import example_table
from forecast_train.evaluation.bin_scores import (
    bin_labels,
    bins_from_forecasts,
    ece,
    found_near_best,
    score_bins,
)

K = 4
P = np.array([[0.7, 0.2, 0.1, 0.0], [0.1, 0.3, 0.4, 0.2], [0.0, 0.0, 0.5, 0.5]])
Y = np.array([0, 1, 3])


def test_scores_of_three_forecasts_by_hand() -> None:
    found = score_bins(P, Y)
    assert found.hit == [1, 0, 0]  # of two equal probabilities the first counts
    assert found.confidence == [0.7, 0.4, 0.5]
    assert found.accuracy == pytest.approx(1 / 3)
    assert found.off_by_one == 1.0
    brier = [(0.09 + 0.04 + 0.01) / 2, (0.01 + 0.49 + 0.16 + 0.04) / 2, (0.25 + 0.25) / 2]
    assert found.brier == pytest.approx(np.mean(brier))
    # (P_1 - 1[1 >= y])^2 + ... over the first three labels, by 3.
    rps = [(0.09 + 0.01 + 0.0) / 3, (0.01 + 0.36 + 0.04) / 3, (0.0 + 0.0 + 0.25) / 3]
    assert found.rps == pytest.approx(np.mean(rps))
    assert found.nll == pytest.approx(-np.mean(np.log([0.7, 0.3, 0.5])))


def test_the_paper_s_uniform_forecast_over_eight_bins_has_a_brier_of_0_4375() -> None:
    assert score_bins(np.full((5, 8), 1 / 8), np.arange(5)).brier == pytest.approx(0.4375)


def test_a_perfect_forecast_and_the_worst_one() -> None:
    sure = np.eye(8)[[0, 3, 7]]
    perfect, worst = score_bins(sure, np.array([0, 3, 7])), score_bins(np.eye(8)[[0]], np.array([7]))
    assert (perfect.accuracy, perfect.brier, perfect.rps, perfect.nll) == (1.0, 0.0, 0.0, 0.0)
    assert (worst.accuracy, worst.brier, worst.rps) == (0.0, 1.0, 1.0)
    assert worst.nll == pytest.approx(-math.log(1e-12))


def test_ece_has_ten_buckets_of_equal_width() -> None:
    confidence = np.array([0.05, 0.07, 0.93, 0.97, 1.0])
    hit = np.array([False, True, True, True, False])
    # Two in [0, 0.1): |0.06 - 0.5|; three in [0.9, 1]: |0.9667 - 0.6667|.
    assert ece(confidence, hit) == pytest.approx(2 / 5 * 0.44 + 3 / 5 * 0.3)


def test_what_has_no_score_is_refused() -> None:
    with pytest.raises(ValueError, match="one at least"):
        score_bins(np.zeros((0, 4)), np.zeros(0, dtype=np.intp))
    with pytest.raises(ValueError, match="sum to 1"):
        score_bins(np.zeros((1, 4)), np.array([0]))


def test_failures_are_the_last_label() -> None:
    assert bin_labels(np.array([math.nan, 0.0, -9.0, 9.0])).tolist() == [15, 5, 0, 14]


def test_recovery_is_finding_one_within_a_fifth_among_the_first_tenth() -> None:
    times = np.log2(np.linspace(1.0, 2.9, 20))
    order = np.arange(20)
    assert found_near_best(order, times)
    assert found_near_best(np.roll(order, -2), times)  # the first two tried are 20 and 30 % slower
    assert not found_near_best(np.roll(order, -3), times)
    assert found_near_best(np.roll(order, -3), times, share=0.9)
    assert not found_near_best(np.roll(order, -2), times, within=0.19)
    lost = np.array([math.nan, 0.0, 1.0])
    assert not found_near_best(np.array([2, 1, 0]), lost, share=0.3)
    assert found_near_best(np.array([1, 0, 2]), lost, share=0.3)


def test_bins_of_forecasts_are_shares_of_joint_draws() -> None:
    """Level errors that all candidates share must cancel: bins speak of ratios."""
    candidates = list(example_table().by_candidate())[:3]

    def sample(rows: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:  # type: ignore[type-arg]
        return np.asarray(np.array([0.0, 1.1, 0.0])[rows] + 5.0 * generator.standard_normal((count, 1)))

    forecasts = Forecasts(candidates, np.zeros(3), np.full(3, 5.0), np.array([0.0, 0.0, 0.25]), sample)
    found = bins_from_forecasts(forecasts, np.array([1, 2]), reference=0)
    np.testing.assert_allclose(found.sum(axis=1), 1.0)
    assert found[0, BINS.index(1.1)] == 1.0
    assert found[1, BINS.index(0.0)] == 0.75
    assert found[1, BINS.failure_index] == 0.25


# --- the defect of the reference implementation (codezakh/gpu-forecasters at 6393a51) ---

PROMPT = (0.25, 0.5, 0.707, 1.0, 1.414, 2.0, 4.0)
"""Upper edges of the speedup bins 1..7 as its prompt, tool schema and enum comments say them."""


def told(speedup: float) -> int:
    """The bin that a model names which knows the speedup and obeys the prompt: edges belong to the lower."""
    return 1 + sum(speedup > edge for edge in PROMPT)


def labelled(speedup: float) -> int:
    """`SpeedupBin.from_speedup`: what its data sets hold as the truth."""
    return min(8, max(1, math.floor(2 * math.log2(speedup)) + 4))


@given(st.floats(0.2501, 2.828))
def test_there_a_perfect_forecaster_who_obeys_the_prompt_is_never_right(speedup: float) -> None:
    if min(abs(speedup - edge) for edge in PROMPT) < 1e-3:  # on an edge both tables may agree
        return
    assert told(speedup) != labelled(speedup)
    assert abs(told(speedup) - labelled(speedup)) <= 1


def test_there_the_share_that_is_right_is_nothing_around_1() -> None:
    speedups = 2.0 ** np.linspace(-1.0, 1.49, 500)
    assert not any(told(s) == labelled(s) for s in speedups if not math.log2(s).is_integer())


@given(st.floats(-6.0, 6.0))
def test_here_the_prompt_and_the_labels_speak_of_the_same_bins(log2_ratio: float) -> None:
    """A model that reads the table in our prompt and knows the ratio names the label, always."""
    problem = example_table().problem
    prefix = forecast_prompt(
        ProblemDescription(problem), ["x"], ReferenceTime(0.0, "x", measured=True)
    ).prefix
    read = Bins.from_table(prefix)
    assert read == BINS
    letters = [f"{label.token} = " for label in BINS.labels]
    ratio = 2.0**log2_ratio
    named = sum(ratio >= edge for edge in read.ratios)
    assert bin_labels(np.array([log2_ratio]))[0] == named
    assert f"\n{letters[named]}" in prefix


@given(st.lists(st.floats(0.01, 100.0), min_size=3, max_size=24, unique=True))
def test_any_bins_can_be_read_back_from_their_table(ratios: list[float]) -> None:
    rounded = tuple(sorted({float(f"{r:g}") for r in ratios}))
    if len(rounded) < 3:
        return
    assert Bins.from_table(Bins(rounded).table()) == Bins(rounded)
