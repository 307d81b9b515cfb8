# two embedding_bags over halves of the bags, into one result
import torch


def run(table, index):
    half = index.shape[0] // 2
    if not half:
        return torch.nn.functional.embedding_bag(index, table, mode="sum")
    parts = [
        torch.nn.functional.embedding_bag(part, table, mode="sum") for part in (index[:half], index[half:])
    ]
    return torch.cat(parts)
