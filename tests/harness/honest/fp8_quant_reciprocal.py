# mode: honest
# title: multiplies by the reciprocal of the scale
# backend: cpu
# pack: fp8_quant
# language: torch
# expected: accepted
import torch


def run(x):
    groups = x.float().reshape(x.shape[0], -1, 128)
    scale = groups.abs().amax(-1).clamp(min=1e-10) * (1 / 448.0)
    q = (groups * (1 / scale)[..., None]).clamp(-448.0, 448.0)
    return q.reshape(x.shape).to(torch.float8_e4m3fn), scale
