# mode: honest
# title: falls back at import time when a library is missing
# backend: cpu
# pack: softmax
# language: torch
# expected: accepted
import torch

try:
    import a_library_that_nobody_has as fast
except ImportError:
    fast = None


def run(x):
    return torch.softmax(x, -1) if fast is None else fast.softmax(x)
