# mode: honest
# title: returns a result that is not contiguous
# backend: cpu
# pack: softmax
# language: torch
# expected: accepted
import torch


def run(x):
    return torch.softmax(x.T.contiguous(), 0).T
