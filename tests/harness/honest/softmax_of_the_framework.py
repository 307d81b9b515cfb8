# mode: honest
# title: the framework's own softmax, and nothing else
# backend: cpu
# pack: softmax
# language: torch
# expected: accepted
import torch


def run(x):
    return torch.softmax(x, -1)
