"""Bins: one array of edges for prompt, labels and moments."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from forecast_autotune.llm.bins import BINS


@given(st.floats(min_value=0.01, max_value=100.0))
def test_a_model_that_obeys_the_table_is_right(ratio: float) -> None:
    """Reads the printed ranges only, and answers with the letter whose range holds the ratio."""
    answers = []
    for line in BINS.table().splitlines()[:-1]:
        letter, _, text = line.partition(" = ")
        numbers = [
            float(w) for w in text.replace("below ", "0 ").replace("at least ", "").split() if w != "to"
        ]
        low, high = numbers[0], numbers[1] if len(numbers) > 1 else math.inf
        if low <= ratio < high:
            answers.append(letter)
    assert (
        answers == [BINS.labels[int(BINS.index(math.log2(ratio)))].token]
        or min(abs(math.log2(ratio) - BINS.edges)) < 1e-12
    )


@given(st.floats(min_value=-0.9, max_value=2.3), st.floats(min_value=0.0, max_value=0.9))
def test_moments_give_back_what_soft_targets_hold(log2_ratio: float, p_fail: float) -> None:
    target = BINS.soft_targets([log2_ratio], 0.1) * (1 - p_fail)
    target[:, BINS.failure_index] += p_fail
    mean, sd, failing = BINS.moments(target)
    k = int(BINS.index(log2_ratio))
    widest = np.diff(BINS.bounds, axis=1)[max(0, k - 1) : k + 2].max()
    assert abs(mean[0] - log2_ratio) <= widest
    assert 0.0 < sd[0] <= 0.1 + 1.5 * widest
    assert failing[0] == pytest.approx(p_fail)


@given(st.floats(min_value=-3.0, max_value=5.0), st.floats(min_value=0.01, max_value=1.0))
def test_soft_targets_are_distributions_around_the_bin(log2_ratio: float, sigma: float) -> None:
    assume(np.abs(BINS.edges - log2_ratio).min() > 1e-6)  # on an edge both bins hold the median
    target = BINS.soft_targets([log2_ratio], sigma)[0]
    assert target.sum() == pytest.approx(1.0)
    assert target.min() >= 0.0
    cumulative = target.cumsum()
    # The median of a normal is its mean, so the bin that holds the value holds the median.
    assert int(np.searchsorted(cumulative, 0.5 - 1e-9)) == int(BINS.index(log2_ratio))
