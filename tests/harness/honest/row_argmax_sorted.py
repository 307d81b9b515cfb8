# mode: honest
# title: sorts instead of searching
# backend: cpu
# pack: row_argmax
# language: torch
# expected: accepted
import torch


def run(x):
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[:, 0].clone()
