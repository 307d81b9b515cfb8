# mode: honest
# title: keeps the probabilities in half precision, as tensor cores want them
# backend: cpu
# pack: attention
# language: torch
# expected: accepted
import torch


def run(q, k, v):
    t = q.shape[2]
    scores = (q.float() @ k.float().transpose(-1, -2)) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = e.sum(-1, keepdim=True)
    return ((e.half().float() @ v.float()) / total).to(q.dtype)
