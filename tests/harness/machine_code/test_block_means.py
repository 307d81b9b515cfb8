"""What races make of their blocks: several calls, some launches of which somebody else has held up."""

from __future__ import annotations

import random

import pytest

from forecast_harness.clocks.runner.messages import PAUSES
from forecast_harness.trials.judging.races.rules import log2_ratio, mean_log2_ratio
from forecast_harness.trials.machine_code.shared_runner import block_means


def test_what_strays_in_another_block_of_each_call_moves_nothing() -> None:
    """All calls take as long for both; of the rival's four blocks of each call, one was disturbed."""
    disturbed = [[0.4 if n == number else 0.0 for n in range(4)] for number in range(3)]
    ratio, error = mean_log2_ratio(disturbed)
    assert ratio == 0.0
    assert error >= 0.0
    together = [sum(call[n] for call in disturbed) / 3 for n in range(4)]
    assert log2_ratio(together)[0] < -0.1, "taken together first, most blocks are disturbed"


def test_the_ratio_of_several_calls_is_the_mean_of_theirs() -> None:
    ratio, error = mean_log2_ratio([[0.1, 0.1, 0.1], [-0.3, -0.3, -0.3]])
    assert ratio == pytest.approx((log2_ratio([0.1] * 3)[0] + log2_ratio([-0.3] * 3)[0]) / 2)
    assert error == 0.0
    assert mean_log2_ratio([[0.2, 0.0, 0.4]]) == log2_ratio([0.2, 0.0, 0.4])


@pytest.mark.parametrize("recorded", [True, False])
def test_a_launch_that_was_held_up_is_left_out_where_blocks_are_few(recorded: bool) -> None:
    chance = random.Random(3)
    seconds = [6e-6 + 1e-7 * chance.random() for _ in range(4 * PAUSES)]
    seconds[5] = 60e-6
    held_up, usual = block_means(seconds, recorded), block_means(seconds, recorded, strays=False)
    assert max(held_up) > 1.5 * min(held_up)
    assert max(usual) < 1.02 * min(usual)
    assert len(held_up) == len(usual) == len(seconds) // (PAUSES if recorded else 4)


def test_a_source_that_is_slow_every_other_time_is_slow() -> None:
    slow = [6e-6, 12e-6] * (2 * PAUSES)
    assert min(block_means(slow, True, strays=False)) >= 8e-6
    assert min(block_means(slow, True)) == pytest.approx(9e-6)
