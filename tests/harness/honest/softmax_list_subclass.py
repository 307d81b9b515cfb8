# mode: honest
# title: returns a list of its own kind
# backend: cpu
# pack: softmax
# language: torch
# expected: accepted
import torch


class Outputs(list):
    """With names for its items."""

    @property
    def probabilities(self):
        return self[0]


def run(x):
    return Outputs([torch.softmax(x, -1)])
