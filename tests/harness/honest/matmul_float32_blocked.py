# mode: honest
# title: accumulates products of blocks in single precision
# backend: cpu
# pack: matmul_float32
# language: torch
# expected: accepted
import torch


def run(a, b):
    c = torch.zeros(a.shape[0], b.shape[1], device=a.device)
    for k in range(0, a.shape[1], 16):
        c += a[:, k : k + 16] @ b[k : k + 16]
    return c
