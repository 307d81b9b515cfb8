"""Dynamic int8 quantisation, a scale per token: the row is read for its maximum and read again."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, integers, unset
from benchmarks.kernels.serving._work import moved

FAMILY, HAND = "quantise", "serving"


@triton.jit
def srv_token_quant_int8(
    x_ptr,
    xq_ptr,
    scale_ptr,
    num_tokens,
    hidden_size,
    stride_x,
    stride_xq,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    row_id = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    row_mask = row_id < num_tokens
    cols = tl.arange(0, BLOCK_SIZE)
    x_rows = x_ptr + row_id.to(tl.int64)[:, None] * stride_x
    xq_rows = xq_ptr + row_id.to(tl.int64)[:, None] * stride_xq
    running = tl.zeros([BLOCK_TOKENS, BLOCK_SIZE], dtype=tl.float32)
    for start in range(0, hidden_size, BLOCK_SIZE):
        mask = row_mask[:, None] & (start + cols < hidden_size)[None, :]
        x = tl.load(x_rows + (start + cols)[None, :], mask=mask, other=0.0, eviction_policy="evict_last")
        running = tl.maximum(running, tl.abs(x.to(tl.float32)))
    absmax = tl.maximum(tl.max(running, axis=1), 1e-10)
    tl.store(scale_ptr + row_id, absmax / 127.0, mask=row_mask)
    inv_scale = (127.0 / absmax)[:, None]
    for start in range(0, hidden_size, BLOCK_SIZE):
        mask = row_mask[:, None] & (start + cols < hidden_size)[None, :]
        x = tl.load(x_rows + (start + cols)[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        x_q = tl.floor(x.to(tl.float32) * inv_scale + 0.5).to(tl.int8)
        tl.store(xq_rows + (start + cols)[None, :], x_q, mask=mask)


SPACE: Space = {
    "kwargs": {"BLOCK_TOKENS": [1, 2, 8], "BLOCK_SIZE": [256, 512, 1024, 2048, 4096, 8192]},
    "num_warps": [2, 4, 8, 16],
    "num_stages": [3],
    "where": lambda c: c["BLOCK_TOKENS"] * c["BLOCK_SIZE"] <= 8192,
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    tokens, hidden = tiny if small else shape
    # Multiples of a power of two, of which the largest is 127: no quotient is near a half.
    x = integers(-127, 128, (tokens, hidden), device, dtype=torch.int8, seed=1).to(torch.bfloat16)
    x[:, 0] = 127.0
    x *= torch.exp2(integers(2, 6, (tokens, 1), device, dtype=torch.int32, seed=2)).to(torch.bfloat16)
    x_q = unset((tokens, hidden), device, dtype=torch.int8)
    scale = unset((tokens, 1), device, dtype=torch.float32)
    return {
        "args": (x, x_q, scale, tokens, hidden, x.stride(0), x_q.stride(0)),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(tokens, meta["BLOCK_TOKENS"]),),
        "outputs": (x_q, scale),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x = data["args"][0].float()
    scale = x.abs().amax(-1, keepdim=True) / 127.0
    return (x / scale).round(), scale


CASES = [
    Case(
        name=f"srv_token_quant_int8/{tokens}x{hidden}",
        kernel=srv_token_quant_int8,
        key=("num_tokens", "hidden_size"),
        space=SPACE,
        make=partial(_make, (tokens, hidden), (5, 600)),
        reference=_reference,
        tolerance=(1e-3, 1e-3),
        # Absolute value, maximum, scale, round.
        flops=4.0 * tokens * hidden,
        bytes=moved(partial(_make, (tokens, hidden), (tokens, hidden))),
    )
    for tokens, hidden in [
        (16, 4096),
        (64, 14336),
        (512, 5120),
        (2048, 8192),
        (8192, 4096),
        (4096, 28672),
        (16384, 8192),
        (65536, 1024),
        (256, 53248),
    ]
]
