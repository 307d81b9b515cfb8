"""Kernels in Helion's language, plain: what each computes, at one shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import helion.language as hl  # type: ignore[import-not-found]
import torch


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(x.size()):
        out[tile] = x[tile] + y[tile]
    return out


def softmax(x: torch.Tensor) -> torch.Tensor:
    rows, _ = x.size()
    out = torch.empty_like(x)
    for tile in hl.tile(rows):
        out[tile, :] = torch.nn.functional.softmax(x[tile, :], dim=1)
    return out


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    rows, _ = x.size()
    out = torch.empty_like(x)
    for tile in hl.tile(rows):
        values = x[tile, :].to(torch.float32)
        variance, mean = torch.var_mean(values, dim=-1, keepdim=True, correction=0)
        normal = (values - mean) * torch.rsqrt(variance + 1e-5)
        out[tile, :] = (normal * weight[:].to(torch.float32) + bias[:].to(torch.float32)).to(x.dtype)
    return out


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    m, k = x.size()
    _, n = y.size()
    out = torch.empty([m, n], dtype=x.dtype, device=x.device)
    for tile_m, tile_n in hl.tile([m, n]):
        total = hl.zeros([tile_m, tile_n], dtype=torch.float32)
        for tile_k in hl.tile(k):
            total = torch.addmm(total, x[tile_m, tile_k], y[tile_k, tile_n])
        out[tile_m, tile_n] = total.to(x.dtype)
    return out


def row_sums(x: torch.Tensor) -> torch.Tensor:
    rows, _ = x.size()
    out = torch.empty([rows], dtype=x.dtype, device=x.device)
    for tile in hl.tile(rows):
        out[tile] = x[tile, :].to(torch.float32).sum(-1).to(x.dtype)
    return out


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, (x.shape[1],), weight, bias)


KERNELS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], Callable[..., Any]]] = {
    "add": (add, ((8192, 8192), (8192, 8192)), torch.add),
    "softmax": (softmax, ((8192, 2048),), lambda x: torch.softmax(x, dim=1)),
    "layer_norm": (layer_norm, ((8192, 4096), (4096,), (4096,)), _layer_norm),
    "matmul": (matmul, ((4096, 4096), (4096, 4096)), torch.matmul),
    "row_sums": (row_sums, ((8192, 4096),), lambda x: x.sum(-1)),
}
"""Function, shapes of its arguments, and what it should compute, by name."""
