"""What the kernel of softmax.cu computes."""

import torch


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Of each row."""
    return torch.softmax(x, -1)
