"""A solution of `softmax` whose launches are thousands of tiny kernels, so many that its time can be set."""

MANY_KERNELS = """import torch

scratch = None


def run(x):
    global scratch
    scratch = torch.ones(4096, device=x.device) if scratch is None else scratch
    for _ in range({turns}):
        scratch.mul_(1.0)
    return torch.softmax(x, -1)
"""
