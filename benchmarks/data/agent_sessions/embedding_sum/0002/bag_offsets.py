# embedding_bag on one flat list of indices with offsets: the same sums, with the bags' ends told
import torch


def run(table, index):
    offsets = torch.arange(0, index.numel(), index.shape[1])
    return torch.nn.functional.embedding_bag(index.reshape(-1), table, offsets, mode="sum")
