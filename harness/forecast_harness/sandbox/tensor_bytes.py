"""`TensorBytes` <-> torch tensor. torch is imported when a function is called."""

from __future__ import annotations

from typing import Any

from forecast_harness.sandbox.jobs import TensorBytes


def tensor_to_bytes(tensor: Any) -> TensorBytes:
    """The bytes of a tensor of any strides and device, row-major. Raises `WireError` for other dtypes."""
    import torch

    plain = tensor.detach().cpu().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return TensorBytes(str(plain.dtype).removeprefix("torch."), tuple(plain.shape), raw)


def tensor_from_bytes(array: TensorBytes, device: str = "cpu") -> Any:
    """A new contiguous tensor of the array's shape and dtype."""
    import torch

    dtype = getattr(torch, array.dtype)
    if not array.data:
        return torch.empty(array.shape, dtype=dtype, device=device)
    return torch.frombuffer(bytearray(array.data), dtype=dtype).reshape(array.shape).to(device)
