# mode: honest
# title: multiplies the table by counts
# backend: cpu
# pack: embedding_sum
# language: torch
# expected: accepted
import torch


def run(table, index):
    counts = torch.zeros(index.shape[0], table.shape[0], device=table.device)
    counts.scatter_add_(1, index, torch.ones(index.shape, device=table.device))
    return counts @ table
