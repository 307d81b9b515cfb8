"""Rewards and losses against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forecast_autotune.llm.bins import BINS
from forecast_train.llm.losses import (
    bin_loss,
    expected_log2_ratio,
    expected_regret,
    expected_reward,
    rank_loss,
)
from forecast_train.llm.rewards import REWARDS, StatedDistribution, brier, crps, regret_reward

UNIFORM = StatedDistribution((0.125,) * 8, 3)
SURE = StatedDistribution((0, 0, 0, 1.0, 0, 0, 0, 0), 3)
NEAR = StatedDistribution((0, 0, 0.25, 0.5, 0.25, 0, 0, 0), 2)


@pytest.mark.parametrize(
    ("stated", "truth", "expected"),
    [
        # (correctness, + 1 - Brier, + 1 - CRPS)
        (SURE, 3, (1.0, 2.0, 2.0)),
        # Brier: half of 1 + 1; CRPS: the cumulative is off on 3, 4, 5 and 6 of 7.
        (SURE, 7, (0.0, 0.0, 1 - 4 / 7)),
        # The paper's uniform forecast has Brier 0.4375.
        (UNIFORM, 3, (1.0, 2 - 0.4375, 2 - sum([1, 4, 9, 16, 9, 4, 1]) / 64 / 7)),
        # Named bin 2 is not the most probable: only the name counts as correct.
        (NEAR, 2, (1.0, 2 - 0.5 * (0.75**2 + 0.5**2 + 0.25**2), 2 - (0.75**2 + 0.25**2) / 7)),
        (NEAR, 3, (0.0, 1 - 0.5 * (0.25**2 + 0.5**2 + 0.25**2), 1 - (0.25**2 + 0.25**2) / 7)),
        (None, 3, (0.0, 0.0, 0.0)),
    ],
)
def test_rewards_are_the_papers(
    stated: StatedDistribution | None, truth: int, expected: tuple[float, ...]
) -> None:
    assert [reward(stated, truth) for reward in REWARDS.values()] == pytest.approx(expected)


@pytest.mark.parametrize("bad", [(0.5, 0.6), (1.5, -0.5), (0.2, 0.2)])
def test_what_is_no_distribution_is_refused(bad: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="sums to 1"):
        StatedDistribution(bad, 0)


@given(st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4), st.lists(st.floats(0.01, 1.0), min_size=4))
def test_shaped_rewards_are_proper(belief: list[float], other: list[float]) -> None:
    """Whoever states what they believe expects at least as much as whoever states something else."""
    p, q = np.array(belief) / sum(belief), np.array(other[:4]) / sum(other[:4])
    for score in (brier, crps):
        honest, dishonest = (
            sum(p[k] * score(stated[None, :], np.array([k]))[0] for k in range(4)) for stated in (p, q)
        )
        assert honest <= dishonest + 1e-12


def test_a_ranking_earns_by_what_it_would_choose() -> None:
    truth = [1.0, 0.0, math.nan, 2.0]
    assert regret_reward([3.0, 2.0, 4.0, 9.0], truth) == 1.0
    assert regret_reward([1.0, 2.0, 4.0, 9.0], truth) == 0.5
    assert regret_reward([1.0, 2.0, 0.0, 9.0], truth) == 0.0
    assert regret_reward([None, None, None, 5.0], truth) == 0.25
    assert regret_reward([None] * 4, truth) == 0.0
    with pytest.raises(ValueError, match="ran"):
        regret_reward([1.0], [math.nan])


def test_bin_loss_is_least_at_the_target_and_grows_with_the_distance() -> None:
    target = torch.as_tensor(BINS.soft_targets([0.3, math.nan], 0.1)).float()
    at_target = bin_loss(target.clamp_min(1e-9).log(), target)
    entropy = -(target * target.clamp_min(1e-9).log()).sum(-1).mean()
    assert float(at_target) == pytest.approx(float(entropy), abs=1e-5)
    near, far = (torch.full((1, len(BINS) + 1), -8.0) for _ in range(2))
    k = int(BINS.index(0.3))
    near[0, k + 1], far[0, k + 5] = 8.0, 8.0
    hard = torch.nn.functional.one_hot(torch.tensor([k]), len(BINS) + 1).float()
    assert bin_loss(near, hard) < bin_loss(far, hard)
    assert float(bin_loss(near, hard, 0.0)) == pytest.approx(float(bin_loss(far, hard, 0.0)))


def test_expected_rewards_equal_the_sum_over_named_bins() -> None:
    logits = torch.tensor([[0.3, -1.0, 0.7, 0.1], [2.0, 0.0, -2.0, 0.5]], dtype=torch.float64)
    truth = torch.tensor([2, 0])
    p = logits.softmax(-1)
    for kind, reward in REWARDS.items():
        by_hand = [
            sum(
                float(row[a]) * reward(StatedDistribution(tuple(map(float, row)), a), int(t))
                for a in range(4)
            )
            for row, t in zip(p, truth, strict=True)
        ]
        assert float(expected_reward(logits, truth, kind)) == pytest.approx(np.mean(by_hand), abs=1e-6)
    with pytest.raises(ValueError, match="correctness"):
        expected_reward(logits, truth, "brier")  # type: ignore[arg-type]


def test_means_charge_failures() -> None:
    centres = torch.tensor([-1.0, 0.0, 1.0])
    logits = torch.tensor([[-50.0, -50.0, 50.0, -50.0], [-50.0, -50.0, -50.0, 50.0]])
    assert expected_log2_ratio(logits, centres, 6.0).tolist() == pytest.approx([1.0, 6.0])


def test_rank_loss_sees_only_pairs_that_were_told_apart_in_one_group() -> None:
    truth = torch.tensor([0.0, 0.01, 1.0, math.nan, 0.0])
    group = torch.tensor([0, 0, 0, 0, 1])
    right = torch.tensor([0.0, 0.01, 1.0, 5.0, 9.0])
    wrong = torch.tensor([1.0, 0.01, 0.0, -5.0, 9.0])
    assert rank_loss(right, truth, group) < 1e-6
    assert rank_loss(wrong, truth, group) > 1.0
    swapped = torch.tensor([0.01, 0.0, 1.0, 5.0, -9.0])
    # The first two are within the noise, the last is in a group of its own: neither order matters.
    assert float(rank_loss(swapped, truth, group)) == pytest.approx(
        float(rank_loss(right, truth, group)), abs=1e-6
    )
    alone = torch.tensor([1.0], requires_grad=True)
    rank_loss(alone, torch.tensor([0.5]), torch.tensor([0])).backward()
    assert alone.grad is not None
    assert alone.grad.item() == 0.0


def test_expected_regret_is_zero_for_the_best_choice_and_charges_failures_most() -> None:
    truth = torch.tensor([0.0, 1.0, math.nan])
    group = torch.zeros(3, dtype=torch.long)
    choose = lambda i: torch.nn.functional.one_hot(torch.tensor(i), 3).float() * -10.0  # noqa: E731
    found = [float(expected_regret(choose(i), truth, group)) for i in range(3)]
    assert found == pytest.approx([0.0, 1.0, 4.0], abs=1e-6)
    nothing_ran = torch.full((2,), math.nan)
    assert float(expected_regret(torch.zeros(2), nothing_ran, torch.zeros(2, dtype=torch.long))) == 0.0
