"""When finalists have been timed in turns for long enough."""

from __future__ import annotations

import random

import pytest

from forecast_integrations.triton.timer.separation import is_separated


def times(median: float, spread: float, rounds: int = 20, seed: int = 0) -> list[float]:
    """Times around a median, a few of which the machine has disturbed."""
    draw = random.Random(seed)
    return [median + draw.gauss(0.0, spread) for _ in range(rounds)] + [3.0 * median]


@pytest.mark.parametrize(
    ("gap", "spread", "separated"),
    [
        (0.05, 0.01, True),
        (0.02, 0.10, False),  # as likely by chance
        (0.00, 0.10, False),
        (0.00, 0.001, True),  # whichever is taken, it costs nothing
        (0.01, 0.001, True),
    ],
)
def test_a_gap_beyond_the_noise_or_one_that_does_not_matter_is_enough(
    gap: float, spread: float, separated: bool
) -> None:
    found = [times(1.0 + gap, spread, seed=1), times(1.0, spread, seed=2), times(2.0, spread, seed=3)]
    assert is_separated(found) is separated


def test_one_close_rival_is_enough_to_go_on() -> None:
    far, close = times(1.5, 0.02, seed=1), times(1.002, 0.02, seed=2)
    assert is_separated([times(1.0, 0.02), far])
    assert not is_separated([times(1.0, 0.02), far, close])


def test_single_times_tell_nothing() -> None:
    assert not is_separated([[1.0], [2.0]])
    assert is_separated([[1.0]])
