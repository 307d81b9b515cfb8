# mode: honest
# title: compiled by torch.compile, which keeps threads and processes
# backend: cpu
# pack: softmax
# language: torch
# expected: accepted
import torch


@torch.compile(dynamic=True)
def compiled(x):
    shifted = (x - x.amax(-1, keepdim=True)).exp()
    return shifted / shifted.sum(-1, keepdim=True)


def run(x):
    return compiled(x)
