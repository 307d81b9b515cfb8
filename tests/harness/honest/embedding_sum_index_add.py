# mode: honest
# title: adds rows into the output
# backend: cpu
# pack: embedding_sum
# language: torch
# expected: accepted
import torch


def run(table, index):
    bags = torch.arange(index.shape[0], device=index.device)
    y = torch.zeros(index.shape[0], table.shape[1], device=table.device)
    for rows in index.unbind(1):  # no bag twice at once: a device adds those in no order
        y.index_add_(0, bags, table[rows])
    return y
