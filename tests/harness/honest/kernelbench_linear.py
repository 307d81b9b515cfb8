# mode: honest
# title: a module with the task's parameters, computed its own way
# backend: cpu
# pack: tasks/linear.py
# language: torch
# expected: accepted
import torch


class ModelNew(torch.nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.linear = torch.nn.Linear(width, out)

    def forward(self, x):
        y = torch.einsum("bi,oi->bo", x, self.linear.weight)
        return (y + self.linear.bias).clamp(min=0)
