"""Outgoing triangle multiplicative update."""

import torch


def make(axes, inputs, generator):
    scaled = {n: t / t.shape[1] ** 0.5 for n, t in inputs.items() if t.dim() == 2}
    kept = (torch.rand(inputs["mask"].shape, generator=generator) < 0.8).float()
    return {**inputs, **scaled, "mask": kept}


def _norm(x, weight, bias):
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, 1e-5)


def reference(
    x,
    mask,
    norm_weight,
    norm_bias,
    left,
    right,
    left_gate,
    right_gate,
    out_gate,
    out_norm_weight,
    out_norm_bias,
    out,
):
    x = _norm(x, norm_weight, norm_bias)
    kept = mask[..., None]
    a = (x @ left.T) * kept * torch.sigmoid(x @ left_gate.T)
    b = (x @ right.T) * kept * torch.sigmoid(x @ right_gate.T)
    update = torch.einsum("bikd,bjkd->bijd", a, b)
    return (_norm(update, out_norm_weight, out_norm_bias) * torch.sigmoid(x @ out_gate.T)) @ out.T
