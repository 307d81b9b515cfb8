# mode: honest
# title: writes intermediate steps into the output's own memory
# backend: cpu
# pack: swiglu
# language: torch
# expected: accepted
import torch


def run(gate, up, y):
    wide = gate.float()
    wide = wide / (1 + torch.exp(-wide))
    y.copy_(wide)
    y.copy_(wide * up.float())
