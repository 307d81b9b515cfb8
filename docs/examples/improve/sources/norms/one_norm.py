# one norm for all rows
import torch


def run(x):
    return torch.linalg.vector_norm(x, dim=-1).clamp(min=1e-06)
