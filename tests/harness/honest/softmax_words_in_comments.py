# mode: honest
# title: names forbidden things in comments only: gc, exec, os._exit, perf_counter, data_ptr
# backend: cpu
# pack: softmax
# language: torch
# expected: accepted
# No exec, eval, gc.get_objects, os._exit or torch.cuda.Stream here; see time.perf_counter for clocks.
import torch


def run(x):
    """Not cached by data_ptr() or _version."""
    return torch.softmax(x, dim=-1)
