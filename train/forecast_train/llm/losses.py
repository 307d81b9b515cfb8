"""Losses on the labels' logits of one forward pass: exact gradients, no sampling.

Logits are [n, labels] with the bins in order and "fails" last; targets are the soft ones of
`forecast_autotune.llm.bins.Bins.soft`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as functional
from torch import Tensor

Reward = Literal["correctness", "correctness_brier", "correctness_crps"]


def bin_loss(logits: Tensor, target: Tensor, rps_weight: float = 0.5) -> Tensor:
    """Cross-entropy with soft targets + `rps_weight` x ranked probability score, mean over the rows.

    Cross-entropy alone is blind to the order of the bins; the second term charges by distance.
    """
    log_p = functional.log_softmax(logits.float(), dim=-1)
    entropy = -(target * log_p).sum(dim=-1)
    gap = (log_p.exp().cumsum(dim=-1) - target.cumsum(dim=-1))[:, :-1]
    return (entropy + rps_weight * gap.square().sum(dim=-1)).mean()


def means(logits: Tensor, centres: Tensor, failure: float) -> Tensor:
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


def expected_reward(logits: Tensor, truth: Tensor, kind: Reward) -> Tensor:
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
