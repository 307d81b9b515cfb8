# mode: honest
# title: reuses a scratch buffer of its own, but returns fresh outputs
# backend: cpu
# pack: softmax
# language: torch
# expected: accepted
import torch

_scratch = {}


def run(x):
    e = _scratch.setdefault((x.shape, x.device), torch.empty_like(x.contiguous()))
    torch.sub(x, x.amax(-1, keepdim=True), out=e)
    e.exp_()
    return e / e.sum(-1, keepdim=True)
