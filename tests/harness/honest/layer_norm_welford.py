# mode: honest
# title: one pass, updating mean and variance block by block
# backend: cpu
# pack: layer_norm
# language: torch
# expected: accepted
import torch


def run(x, weight, bias):
    n = 0
    mean, m2 = torch.zeros(2, x.shape[0], 1, device=x.device)
    for block in x.split(16, -1):
        k = block.shape[1]
        own = block.mean(-1, keepdim=True)
        delta = own - mean
        m2 = m2 + (block - own).square().sum(-1, keepdim=True) + delta**2 * (n * k / (n + k))
        mean = mean + delta * (k / (n + k))
        n += k
    return (x - mean) * torch.rsqrt(m2 / n + 1e-5) * weight + bias
