"""Whether two tensors hold the same bits: NaN is equal to itself, and 0 is not equal to -0."""

from __future__ import annotations

import torch


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtype, shape and every byte are the same; strides do not matter."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(torch.equal(raw_bytes(one), raw_bytes(other)))


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of its elements in order, shape (bytes,): itself where it is contiguous, else a copy."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
