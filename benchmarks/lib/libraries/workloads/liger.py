"""Operations of liger-kernel that tune themselves."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.lib.libraries.workloads.tensors import DEVICE, random_floats, random_tensor, run_backward


def dynamic_tanh(rows: int, width: int) -> None:
    """A learned tanh in the place of a normalisation, of [rows, width]."""
    from liger_kernel.ops.dyt import LigerDyTFunction

    alpha = torch.ones(1, device=DEVICE, requires_grad=True)
    gamma, beta = random_floats(width), random_floats(width)
    run_backward(LigerDyTFunction.apply(random_tensor(rows, width), alpha, gamma, beta))


def mixture_of_experts(tokens: int, width: int, inner: int, experts: int, chosen: int) -> None:
    """A gated mixture of experts, of [tokens, width]."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    x = random_tensor(tokens, width, scale=0.1)
    up = random_tensor(experts, 2 * inner, width, scale=0.02)
    down = random_tensor(experts, width, inner, scale=0.02)
    scores = torch.randn(tokens, experts, device=DEVICE)
    weights, index = scores.softmax(-1).topk(chosen, dim=-1)
    weights = weights.to(torch.bfloat16).requires_grad_()
    run_backward(LigerFusedMoEFunction.apply(x, up, down, index, weights))


def gated_mlp(tokens: int, width: int, inner: int, training: bool) -> None:
    """A gated MLP, of [tokens, width], with or without gradients."""
    from liger_kernel.ops.mlp import LigerMLPFunction

    x = random_tensor(1, tokens, width, scale=0.1, grad=training)
    gate = random_tensor(inner, width, scale=0.02, grad=training)
    up = random_tensor(inner, width, scale=0.02, grad=training)
    down = random_tensor(width, inner, scale=0.02, grad=training)
    result = LigerMLPFunction.apply(x, gate, up, down)
    if training:
        run_backward(result)


WORKLOADS = {
    "dynamic_tanh_8192x4096": partial(dynamic_tanh, 8192, 4096),
    "mixture_of_experts_4096": partial(mixture_of_experts, 4096, 2048, 1024, 32, 4),
    "gated_mlp_4096": partial(gated_mlp, 4096, 2048, 5632, True),
    "dynamic_tanh_512x1024": partial(dynamic_tanh, 512, 1024),
    "gated_mlp_inference_256": partial(gated_mlp, 256, 4096, 11008, False),
}
