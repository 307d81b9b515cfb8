# embedding_bag with the offsets of the bags told as the end of the last one, too
import torch


def run(table, index):
    offsets = torch.arange(0, index.numel() + 1, index.shape[1])
    return torch.nn.functional.embedding_bag(
        index.reshape(-1), table, offsets, mode="sum", include_last_offset=True
    )
