"""Depthwise causal convolution along time with a short filter and SiLU, as in Mamba blocks."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "conv", "chunked"


@triton.jit
def causal_conv1d_fwd(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    T,
    D,
    stride_b,
    stride_t,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i_d, i_t, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_t = i_t * BLOCK_T + tl.arange(0, BLOCK_T)
    o_d = i_d * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    x_ptr += i_b.to(tl.int64) * stride_b
    y_ptr += i_b.to(tl.int64) * stride_b
    bias = tl.load(bias_ptr + o_d, mask=m_d, other=0.0).to(tl.float32)
    acc = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32) + bias[None, :]
    for i_w in tl.static_range(WIDTH):
        o_x = o_t - (WIDTH - 1) + i_w
        m_x = ((o_x >= 0) & (o_x < T))[:, None] & m_d[None, :]
        w = tl.load(w_ptr + o_d * WIDTH + i_w, mask=m_d, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + o_x[:, None] * stride_t + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
        acc += x * w[None, :]
    acc = acc * tl.sigmoid(acc)
    m_y = (o_t < T)[:, None] & m_d[None, :]
    tl.store(y_ptr + o_t[:, None] * stride_t + o_d[None, :], acc.to(y_ptr.dtype.element_ty), mask=m_y)


SPACE: Space = {
    "kwargs": {"BLOCK_T": [1, 4, 16, 32, 64, 128], "BLOCK_D": [32, 64, 128, 256]},
    "num_warps": [1, 2, 4, 8],
    "num_stages": [2],
}

Shape = tuple[int, int, int, int]
"""Batch, time, channels, filter width."""


def _make(shape: Shape, tiny: Shape, device: str, small: bool = False) -> Data:
    b, t, d, width = tiny if small else shape
    x = normal((b, t, d), device, seed=1)
    w, bias = normal((d, width), device, seed=2, scale=width**-0.5), normal((d,), device, seed=3)
    y = unset((b, t, d), device)
    return {
        "args": (x, w, bias, y, t, d, x.stride(0), x.stride(1)),
        "kwargs": {"WIDTH": width},
        "grid": lambda meta: (triton.cdiv(d, meta["BLOCK_D"]), triton.cdiv(t, meta["BLOCK_T"]), b),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, w, bias, y = data["args"][:4]
    width = w.shape[1]
    padded = torch.nn.functional.pad(x.float(), (0, 0, width - 1, 0))
    total = bias.float().expand(y.shape).clone()
    for i in range(width):
        total += padded[:, i : i + y.shape[1]] * w[:, i].float()
    return (torch.nn.functional.silu(total),)


CASES = [
    Case(
        name=f"causal_conv1d/{b}x{t}x{d}w{width}",
        kernel=causal_conv1d_fwd,
        key=("T", "D", "WIDTH"),
        space=SPACE,
        make=partial(_make, (b, t, d, width), tiny),
        reference=_reference,
        tolerance=(5e-3, 5e-3),
        # A multiply-add per tap; the bias, the sigmoid (4) and its product.
        flops=(2.0 * width + 6.0) * b * t * d,
        bytes=2.0 * (2 * b * t * d + d * width + d),
    )
    for (b, t, d, width), tiny in [
        ((8, 4096, 5120, 4), (2, 37, 50, 4)),
        ((2, 2048, 8192, 4), (1, 64, 64, 4)),
        ((16, 512, 1536, 3), (1, 5, 70, 3)),
    ]
]
