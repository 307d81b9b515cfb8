"""What the kernels of this hand share: tiles with checked boundaries, gates, a sequence seen as chunks."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from benchmarks.kernels import normal


@triton.jit
def load_block(p, n_r, n_c, s_r, s_c, i_r, i_c, BR: tl.constexpr, BC: tl.constexpr):
    """The tile of BR x BC from (i_r, i_c) on of a matrix of n_r x n_c, zero outside."""
    o_r = i_r + tl.arange(0, BR)
    o_c = i_c + tl.arange(0, BC)
    mask = (o_r[:, None] >= 0) & (o_r[:, None] < n_r) & (o_c[None, :] < n_c)
    return tl.load(p + o_r[:, None] * s_r + o_c[None, :] * s_c, mask=mask, other=0.0)


@triton.jit
def store_block(p, b, n_r, n_c, s_r, s_c, i_r, i_c, BR: tl.constexpr, BC: tl.constexpr):
    """Write such a tile, in the type of the matrix."""
    o_r = i_r + tl.arange(0, BR)
    o_c = i_c + tl.arange(0, BC)
    mask = (o_r[:, None] < n_r) & (o_c[None, :] < n_c)
    tl.store(p + o_r[:, None] * s_r + o_c[None, :] * s_c, b.to(p.dtype.element_ty), mask=mask)


@triton.jit
def load_steps(p, n, s, i, B: tl.constexpr):
    """B entries from i on of a vector of n entries, zero outside."""
    o = i + tl.arange(0, B)
    return tl.load(p + o * s, mask=o < n, other=0.0)


def split(x: torch.Tensor, chunk: int, *, edge: bool = False) -> torch.Tensor:
    """[B, T, ...] as [B, NT, chunk, ...], padded with zeros or with the last time step."""
    batch, length = x.shape[:2]
    if pad := -length % chunk:
        tail = x[:, -1:].expand(batch, pad, *x.shape[2:])
        x = torch.cat([x, tail if edge else torch.zeros_like(tail)], 1)
    return x.reshape(batch, -1, chunk, *x.shape[2:])


def join(x: torch.Tensor, length: int) -> torch.Tensor:
    """Back from chunks to a sequence."""
    return x.flatten(1, 2)[:, :length]


def log_decay(batch: int, length: int, heads: int, chunk: int, device: str, seed: int) -> torch.Tensor:
    """Logarithms of forget gates [B, T, H], summed up inside each chunk: never positive, never rising."""
    g = -0.05 * normal((batch, length, heads), device, dtype=torch.float32, seed=seed).abs()
    return join(split(g, chunk).cumsum(2), length).contiguous()


def half(small: bool) -> torch.dtype:
    """bfloat16; float16 for the small shapes, because the interpreter multiplies bfloat16 as integers."""
    return torch.float16 if small else torch.bfloat16
