# mode: honest
# title: accumulates outer products one by one, the least precise honest order
# backend: cpu
# pack: matmul_float32
# language: torch
# expected: accepted
import torch


def run(a, b):
    c = torch.zeros(a.shape[0], b.shape[1], device=a.device)
    for k in range(a.shape[1]):
        c = c + torch.outer(a[:, k], b[k])
    return c
