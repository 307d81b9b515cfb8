"""Losses on the labels' logits of one forward pass: exact gradients, no sampling.

Logits are [n, labels] with the bins in order and "fails" last; targets are the soft ones of
`forecast_autotune.llm.bins.Bins.soft`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as functional
from torch import Tensor

RewardName = Literal["correctness", "correctness_brier", "correctness_crps"]


def bin_loss(logits: Tensor, target: Tensor, rps_weight: float = 0.5) -> Tensor:
    """Cross-entropy with soft targets + `rps_weight` x ranked probability score, mean over the rows.

    Cross-entropy alone is blind to the order of the bins; the second term charges by distance.
    """
    log_p = functional.log_softmax(logits.float(), dim=-1)
    entropy = -(target * log_p).sum(dim=-1)
    gap = (log_p.exp().cumsum(dim=-1) - target.cumsum(dim=-1))[:, :-1]
    return (entropy + rps_weight * gap.square().sum(dim=-1)).mean()


def expected_log2_ratio(logits: Tensor, centres: Tensor, failure: float) -> Tensor:
    """Expected log2(time / reference time) per row, [n]; `centres` [bins], a failure counts as `failure`."""
    values = torch.cat([centres, centres.new_tensor([failure])])
    return functional.softmax(logits.float(), dim=-1) @ values


def rank_loss(mean: Tensor, log2_ratio: Tensor, group: Tensor, *, noise: float = 0.04) -> Tensor:
    """Pairwise logistic loss on candidates of one group that are told apart by more than `noise` log2 units.

    `mean` [n] is what the model expects, `log2_ratio` [n] what was measured (NaN: failed, slower than all),
    `group` [n] says which candidates belong together (RankNet, Burges et al. 2005; the difference is in
    log2 units, scaled so that one `noise` apart is a logit of 1). 0 where there is no such pair.
    """
    truth = torch.where(torch.isnan(log2_ratio), torch.full_like(log2_ratio, 1e3), log2_ratio)
    faster = (truth[None, :] - truth[:, None] > noise) & (group[:, None] == group[None, :])
    if not bool(faster.any()):
        return mean.sum() * 0.0
    gap = (mean[None, :] - mean[:, None]) / noise
    return functional.softplus(-gap)[faster].mean() * noise


def expected_reward(logits: Tensor, truth: Tensor, kind: RewardName) -> Tensor:
    """The paper's rewards in expectation over the named bin, mean over rows; maximise it.

    With finitely many labels the expectation is a sum, so its gradient is exact and nothing is sampled. The
    stated distribution is the model's own, and the named bin a draw from it: E[correctness] = p(truth).
    Raises `ValueError` for another kind.
    """
    p = functional.softmax(logits.float(), dim=-1)
    hit = p.gather(1, truth[:, None])[:, 0]
    if kind == "correctness":
        return hit.mean()
    one = functional.one_hot(truth, p.shape[1])
    if kind == "correctness_brier":
        return (hit + 1.0 - 0.5 * (p - one).square().sum(dim=-1)).mean()
    if kind == "correctness_crps":
        gap = (p.cumsum(dim=-1) - one.cumsum(dim=-1))[:, :-1]
        return (hit + 1.0 - gap.square().mean(dim=-1)).mean()
    raise ValueError(f"a reward is correctness, correctness_brier or correctness_crps, got {kind!r}")


def sampled_reward(
    logits: Tensor, truth: Tensor, kind: RewardName, *, replies: int, draws: int, generator: Any = None
) -> Tensor:
    """The same rewards from sampled replies: the value is their mean, the gradient GRPO's; maximise it.

    A reply is `draws` letters drawn from the model: their shares are the distribution that it states, the
    first is the bin that it names. Each of the `replies` per row is weighed by its reward less the mean of
    its group, which is not divided by the group's spread (Dr. GRPO, arXiv 2503.20783). Sampling needs many
    times the steps of `expected_reward`; it is here for comparison. Raises `ValueError` for another kind,
    or fewer than two replies.
    """
    if replies < 2 or draws < 1:
        raise ValueError(f"a group needs two replies or more, of one letter at least: {replies} of {draws}")
    log_p = functional.log_softmax(logits.float(), dim=-1)
    n, labels = log_p.shape
    drawn = torch.multinomial(log_p.detach().exp(), replies * draws, replacement=True, generator=generator)
    letters = drawn.view(n, replies, draws)
    hit = (letters[..., 0] == truth[:, None]).float()
    stated = functional.one_hot(letters, labels).float().mean(dim=2)
    one = functional.one_hot(truth, labels)[:, None, :]
    if kind == "correctness":
        reward = hit
    elif kind == "correctness_brier":
        reward = hit + 1.0 - 0.5 * (stated - one).square().sum(dim=-1)
    elif kind == "correctness_crps":
        gap = (stated.cumsum(dim=-1) - one.cumsum(dim=-1))[..., :-1]
        reward = hit + 1.0 - gap.square().mean(dim=-1)
    else:
        raise ValueError(f"a reward is correctness, correctness_brier or correctness_crps, got {kind!r}")
    likely = log_p.gather(1, drawn).view(n, replies, draws)
    # Letters that do not count towards the reward only add noise.
    said = likely[..., 0] if kind == "correctness" else likely.sum(dim=2)
    gain = ((reward - reward.mean(dim=1, keepdim=True)) * said).mean()
    return reward.mean() + gain - gain.detach()


def expected_regret(mean: Tensor, log2_ratio: Tensor, group: Tensor, *, temperature: float = 0.05) -> Tensor:
    """Expected log2 slowdown of a softmin choice within each group, mean over groups; minimise it.

    `temperature` in log2 units: candidates forecast that close are chosen about as often. Groups where
    nothing ran do not count; a failure counts as 3 doublings slower than the group's slowest.
    """
    total: Any = mean.sum() * 0.0
    count = 0
    for g in group.unique():
        rows = group == g
        truth = log2_ratio[rows]
        ran = ~torch.isnan(truth)
        if not bool(ran.any()):
            continue
        filled = torch.where(ran, truth, truth[ran].max() + 3.0)
        choice = functional.softmax(-mean[rows] / temperature, dim=0)
        total = total + (choice * (filled - truth[ran].min())).sum()
        count += 1
    return torch.as_tensor(total / max(1, count))
