# mode: honest
# title: keeps the packed form of weights that the pack calls static
# backend: cpu
# pack: trimul
# language: torch
# expected: accepted
import torch

_packed = {}


def _norm(x, weight, bias):
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, 1e-5)


def run(x, mask, norm_weight, norm_bias, out_norm_weight, out_norm_bias, out, **weights):
    shape = out.shape
    if shape not in _packed:
        names = ("left", "right", "left_gate", "right_gate", "out_gate")
        _packed[shape] = torch.cat([weights[n] for n in names]).T.contiguous()
    x = _norm(x, norm_weight, norm_bias)
    a, b, ga, gb, go = (x @ _packed[shape]).chunk(5, -1)
    a = (a * mask[..., None] * torch.sigmoid(ga)).permute(0, 3, 1, 2)
    b = (b * mask[..., None] * torch.sigmoid(gb)).permute(0, 3, 2, 1)
    update = (a @ b).permute(0, 2, 3, 1)
    return (_norm(update, out_norm_weight, out_norm_bias) * torch.sigmoid(go)) @ out.T
