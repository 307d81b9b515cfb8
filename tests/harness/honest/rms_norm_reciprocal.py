# mode: honest
# title: multiplies by a reciprocal root, in another order
# backend: cpu
# pack: rms_norm
# language: torch
# expected: accepted
import torch


def run(x, weight):
    wide = x.float()
    inverse = 1 / torch.sqrt((wide * wide).sum(-1, keepdim=True) / x.shape[1] + 1e-6)
    return (wide * (inverse * weight.float())).to(x.dtype)
