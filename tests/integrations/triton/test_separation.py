"""Which finalists more times may yet show to be the fastest."""

from __future__ import annotations

import random

import pytest

from forecast_integrations.triton.timer.timers import contenders


def times(median: float, spread: float, rounds: int = 20, seed: int = 0) -> list[float]:
    """Times around a median, a few of which the machine has disturbed."""
    draw = random.Random(seed)
    return [median + draw.gauss(0.0, spread) for _ in range(rounds)] + [3.0 * median]


@pytest.mark.parametrize(
    ("gap", "spread", "left"),
    [
        (0.05, 0.01, []),
        (0.02, 0.10, [0, 1]),  # as likely by chance
        (0.00, 0.10, [0, 1]),
        (0.00, 0.001, []),  # whichever is taken, it costs nothing
        (0.01, 0.001, []),
    ],
)
def test_a_gap_beyond_the_noise_or_one_that_does_not_matter_is_enough(
    gap: float, spread: float, left: list[int]
) -> None:
    found = [times(1.0 + gap, spread, seed=1), times(1.0, spread, seed=2), times(2.0, spread, seed=3)]
    assert contenders(found) == left


def test_only_close_rivals_are_left() -> None:
    far, close = times(1.5, 0.02, seed=1), times(1.002, 0.02, seed=2)
    assert contenders([far, times(1.0, 0.02)]) == []
    assert contenders([times(1.0, 0.02), far, close]) == [0, 2]


def test_single_times_tell_nothing() -> None:
    assert contenders([[1.0], [2.0]]) == [0, 1]
    assert contenders([[1.0]]) == []
