"""Rotary embedding by halves of the head, q and k in one launch, a token at a time."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "rope", "rows"


@triton.jit
def _rotate(x_ptr, o_ptr, n_heads, cos, sin, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr):
    half: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, half)[None, :]
    for h in range(0, n_heads, HEADS):
        heads = h + tl.arange(0, HEADS)[:, None]
        mask = (heads < n_heads) & (dims < half)
        offsets = heads * HEAD_DIM + dims
        first = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + offsets + half, mask=mask, other=0.0).to(tl.float32)
        tl.store(o_ptr + offsets, first * cos - second * sin, mask=mask)
        tl.store(o_ptr + offsets + half, second * cos + first * sin, mask=mask)


@triton.jit
def rows_rope(
    q_ptr,
    q_row_stride,
    k_ptr,
    k_row_stride,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    n_tokens,
    seq_len,
    n_qh,
    n_kh,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS_PER_PROGRAM: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * TOKENS_PER_PROGRAM
    dims = tl.arange(0, HEAD_DIM // 2)[None, :]
    for token in range(first, tl.minimum(first + TOKENS_PER_PROGRAM, n_tokens)):
        position = token % seq_len
        cos = tl.load(cos_ptr + position * (HEAD_DIM // 2) + dims)
        sin = tl.load(sin_ptr + position * (HEAD_DIM // 2) + dims)
        if BACKWARD:
            sin = -sin
        q_row, q_out = q_ptr + token * q_row_stride, q_out_ptr + token * q_row_stride
        k_row, k_out = k_ptr + token * k_row_stride, k_out_ptr + token * k_row_stride
        _rotate(q_row, q_out, n_qh, cos, sin, HEAD_DIM, HEADS)
        _rotate(k_row, k_out, n_kh, cos, sin, HEAD_DIM, HEADS)


SPACE: Space = {
    "kwargs": {"HEADS": [1, 4, 8, 16, 32], "TOKENS_PER_PROGRAM": [1, 2, 8, 32]},
    "num_warps": [1, 4, 8],
    "num_stages": [1],
}


def _make(shape: tuple[int, ...], tiny: tuple[int, ...], device: str, small: bool = False) -> Data:
    batch, length, q_heads, k_heads, dim = tiny if small else shape
    tokens = batch * length
    q = normal((tokens, q_heads, dim), device, dtype=torch.bfloat16, seed=1)
    k = normal((tokens, k_heads, dim), device, dtype=torch.bfloat16, seed=2)
    angle = normal((length, dim // 2), device, dtype=torch.float32, seed=3, scale=3.0)
    q_out = unset((tokens, q_heads, dim), device, dtype=torch.bfloat16)
    k_out = unset((tokens, k_heads, dim), device, dtype=torch.bfloat16)
    return {
        "args": (
            q,
            q.stride(0),
            k,
            k.stride(0),
            angle.cos(),
            angle.sin(),
            q_out,
            k_out,
            tokens,
            length,
            q_heads,
            k_heads,
        ),
        "kwargs": {"HEAD_DIM": dim, "BACKWARD": False},
        "grid": lambda meta: (triton.cdiv(tokens, meta["TOKENS_PER_PROGRAM"]),),
        "outputs": (q_out, k_out),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    q, _, k, _, cos, sin = data["args"][:6]
    rotated = []
    for x in (q, k):
        first, second = x.float().chunk(2, dim=-1)
        c, s = (t.repeat(len(x) // len(t), 1)[:, None] for t in (cos, sin))
        rotated.append(torch.cat([first * c - second * s, second * c + first * s], dim=-1))
    return tuple(rotated)


CASES = [
    Case(
        name=f"rows_rope/b{batch}s{length}q{q_heads}k{k_heads}d{dim}",
        kernel=rows_rope,
        key=("n_tokens", "n_qh", "n_kh", "HEAD_DIM"),
        space=SPACE,
        make=partial(_make, (batch, length, q_heads, k_heads, dim), tiny),
        reference=_reference,
        tolerance=(2e-2, 1e-2),
        flops=3.0 * batch * length * (q_heads + k_heads) * dim,
        bytes=4.0 * batch * length * (q_heads + k_heads) * dim + 4.0 * length * dim,
    )
    for (batch, length, q_heads, k_heads, dim), tiny in [
        ((1, 8192, 32, 8, 128), (2, 5, 5, 3, 32)),
        ((4, 4096, 64, 8, 128), (1, 3, 2, 3, 16)),
        ((16, 512, 32, 4, 128), (1, 3, 2, 3, 16)),
        ((2, 1024, 16, 2, 128), (1, 3, 2, 3, 16)),
        ((1, 256, 64, 8, 128), (1, 3, 2, 3, 16)),
        ((1, 32768, 48, 8, 128), (1, 3, 2, 3, 16)),
        ((8, 2048, 16, 8, 64), (1, 3, 2, 3, 16)),
        ((1, 512, 32, 8, 64), (1, 3, 2, 3, 16)),
        ((64, 1024, 32, 8, 64), (1, 3, 2, 3, 16)),
    ]
]
