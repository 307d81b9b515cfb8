# mode: honest
# title: takes another path for powers of two, as tuned kernels do
# backend: cpu
# pack: softmax
# language: torch
# expected: accepted
import torch


def run(x):
    n = x.shape[1]
    if n & (n - 1) == 0:
        return torch.softmax(x, -1)
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e * (1 / e.sum(-1, keepdim=True))
