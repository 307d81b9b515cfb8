"""A KernelBench task: a linear layer and a ReLU."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, x):
        return torch.relu(self.linear(x))


batch, width, out = 16, 32, 24


def get_inputs():
    return [torch.randn(batch, width)]


def get_init_inputs():
    return [width, out]
