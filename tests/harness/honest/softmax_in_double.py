# mode: honest
# title: is more precise than asked for
# backend: cpu
# pack: softmax
# language: torch
# expected: accepted
import torch


def run(x):
    return torch.softmax(x.double(), -1).float()
