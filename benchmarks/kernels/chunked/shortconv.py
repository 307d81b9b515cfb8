"""Short depthwise convolution along time in front of a linear attention layer, with bias and SiLU."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.chunked.common import load_block, store_block

FAMILY, HAND = "conv", "chunked"


@triton.heuristics({"USE_BIAS": lambda args: args["bias"] is not None})
@triton.jit
def short_conv(
    x,
    weight,
    bias,
    y,
    T,
    D,
    W: tl.constexpr,
    ACTIVATION: tl.constexpr,
    USE_BIAS: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    i_d, i_t, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_d = i_d * BD + tl.arange(0, BD)
    m_d = o_d < D
    b_y = tl.zeros([BT, BD], dtype=tl.float32)
    for i_w in tl.static_range(-W + 1, 1):
        b_x = load_block(x + i_b * T * D, T, D, D, 1, i_t * BT + i_w, i_d * BD, BT, BD).to(tl.float32)
        b_w = tl.load(weight + o_d * W + (i_w + W - 1), mask=m_d, other=0.0).to(tl.float32)
        b_y += b_x * b_w[None, :]
    if USE_BIAS:
        b_y += tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION == "silu":
        b_y = b_y * tl.sigmoid(b_y)
    store_block(y + i_b * T * D, b_y, T, D, D, 1, i_t * BT, i_d * BD, BT, BD)


SPACE: Space = {
    "kwargs": {"BT": [8, 16, 32, 64, 128], "BD": [16, 32, 64, 128, 256]},
    "num_warps": [1, 2, 4, 8],
    "num_stages": [2],
    "where": lambda p: 256 * p["num_warps"] <= p["BT"] * p["BD"] <= 2048 * p["num_warps"],
}


def _make(shape: tuple[int, ...], tiny: tuple[int, ...], device: str, small: bool = False) -> Data:
    b, t, d, width = tiny if small else shape
    x = normal((b, t, d), device, dtype=torch.bfloat16, seed=1)
    weight = normal((d, width), device, dtype=torch.bfloat16, seed=2, scale=width**-0.5)
    bias = normal((d,), device, dtype=torch.bfloat16, seed=3)
    y = unset((b, t, d), device, dtype=torch.bfloat16)
    return {
        "args": (x, weight, bias, y, t, d),
        "kwargs": {"W": width, "ACTIVATION": "silu"},
        "grid": lambda meta: (triton.cdiv(d, meta["BD"]), triton.cdiv(t, meta["BT"]), b),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, weight, bias = (a.float() for a in data["args"][:3])
    t, width = x.shape[1], weight.shape[1]
    y = bias.expand(x.shape).clone()
    for shift in range(min(width, t)):
        y[:, shift:] += x[:, : t - shift] * weight[:, width - 1 - shift]
    return (y * y.sigmoid(),)


CASES = [
    Case(
        name=f"short_conv/{b}x{t}x{d}x{width}",
        kernel=short_conv,
        key=("T", "D", "W"),
        space=SPACE,
        make=partial(_make, (b, t, d, width), (2, 20, 30, 4)),
        reference=_reference,
        tolerance=(3e-2, 2e-2),
        flops=b * t * d * (2.0 * width + 5),
        bytes=4.0 * b * t * d + 2.0 * d * width + 2.0 * d,
    )
    for b, t, d, width in [
        (1, 2048, 2048, 4),
        (8, 2048, 4096, 4),
        (1, 32768, 2048, 4),
        (32, 512, 1024, 4),
        (4, 8192, 6144, 4),
        (128, 16, 4096, 4),
        (1, 4096, 10240, 4),
        (2, 4096, 2048, 3),
        (16, 2048, 5120, 3),
    ]
]
