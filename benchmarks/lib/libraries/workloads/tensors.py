"""Inputs of workloads: random tensors on the device, and a backward pass through whatever comes out."""

from __future__ import annotations

import os

import torch

DEVICE = os.environ.get("LIBRARY_WORKLOADS_DEVICE", "cuda")
"""Another device (`meta`, `cpu`) makes a dry run of the Python around the kernels."""


def random_tensor(
    *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0, grad: bool = True
) -> torch.Tensor:
    """Normal numbers of a standard deviation of `scale`; a leaf that wants its gradient if `grad`."""
    result = torch.randn(*shape, device=DEVICE, dtype=dtype)
    return (result if scale == 1.0 else result * scale).requires_grad_(grad)


def random_floats(*shape: int, scale: float = 1.0, grad: bool = True) -> torch.Tensor:
    """The same in float32."""
    return random_tensor(*shape, dtype=torch.float32, scale=scale, grad=grad)


def log_decay(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logarithms of gates in (0, 1), as models make them: log-sigmoid of normal numbers."""
    gate = torch.nn.functional.logsigmoid(torch.randn(*shape, device=DEVICE))
    return gate.to(dtype).requires_grad_()


def strengths(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Numbers in (0, 1)."""
    return torch.rand(*shape, device=DEVICE).to(dtype).requires_grad_()


def unit_vectors(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Vectors of length one along the last dimension."""
    result = torch.nn.functional.normalize(torch.randn(*shape, device=DEVICE), dim=-1)
    return result.to(dtype).requires_grad_()


def run_backward(result: object) -> None:
    """Backward of a result, or of the first of several, with a random gradient."""
    first = result[0] if isinstance(result, tuple | list) else result
    assert isinstance(first, torch.Tensor)
    first.backward(torch.randn_like(first))
