# mode: honest
# title: goes through blocks once, rescaling as it goes
# backend: cpu
# pack: softmax
# language: torch
# expected: accepted
import torch


def run(x):
    top = torch.full((x.shape[0], 1), float("-inf"), device=x.device)
    total = torch.zeros(x.shape[0], 1, device=x.device)
    for block in x.split(32, -1):
        new = torch.maximum(top, block.amax(-1, keepdim=True))
        total = total * torch.exp(top - new) + torch.exp(block - new).sum(-1, keepdim=True)
        top = new
    return torch.exp(x - top) / total
