# mode: honest
# title: the framework's own pool within an operation
# backend: cpu
# pack: matmul
# language: torch
# expected: accepted
import torch


def run(a, b):
    # A size from which on the framework divides its work, whatever its pool has.
    return torch.cat([part @ b for part in a.split(64)])
