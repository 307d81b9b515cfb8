# mode: honest
# title: log-sum-exp and gradient without autograd
# backend: cpu
# pack: cross_entropy
# language: torch
# expected: accepted
import torch


def run(logits, target):
    wide = logits.float()
    total = torch.logsumexp(wide, -1)
    rows = torch.arange(wide.shape[0])
    grad = torch.exp(wide - total[:, None])
    grad[rows, target] -= 1
    return total - wide[rows, target], (grad / wide.shape[0]).to(logits.dtype)
