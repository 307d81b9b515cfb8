# mode: honest
# title: adds rows into the output
# backend: cpu
# pack: embedding_sum
# language: torch
# expected: accepted
import torch


def run(table, index):
    bags = torch.arange(index.shape[0], device=index.device).repeat_interleave(index.shape[1])
    y = torch.zeros(index.shape[0], table.shape[1], device=table.device)
    return y.index_add_(0, bags, table[index.reshape(-1)])
