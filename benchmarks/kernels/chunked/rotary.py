"""Rotary embedding in [B, T, H, D] layout: cosines are loaded once for several heads of a block of steps."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "rope", "chunked"


@triton.jit
def rotary_steps(
    x,
    cos,
    sin,
    y,
    T,
    H,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BT: tl.constexpr,
    NH: tl.constexpr,
):
    # R is half a head.
    i_h, i_t, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_t = i_t * BT + tl.arange(0, BT)
    o_r = tl.arange(0, R)
    m_t = (o_t < T)[:, None]
    b_cos = tl.load(cos + o_t[:, None] * R + o_r[None, :], mask=m_t, other=1.0).to(tl.float32)
    b_sin = tl.load(sin + o_t[:, None] * R + o_r[None, :], mask=m_t, other=0.0).to(tl.float32)
    if INTERLEAVED:
        o_x0 = o_r * 2
        o_x1 = o_r * 2 + 1
    else:
        o_x0 = o_r
        o_x1 = o_r + R
    for i in range(NH):
        mask = m_t & (tl.full([BT, 1], i_h * NH + i, tl.int32) < H)
        row = ((i_b * T + o_t) * H + i_h * NH + i)[:, None] * (2 * R)
        b_x0 = tl.load(x + row + o_x0[None, :], mask=mask, other=0.0).to(tl.float32)
        b_x1 = tl.load(x + row + o_x1[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(y + row + o_x0[None, :], (b_x0 * b_cos - b_x1 * b_sin).to(y.dtype.element_ty), mask=mask)
        tl.store(y + row + o_x1[None, :], (b_x0 * b_sin + b_x1 * b_cos).to(y.dtype.element_ty), mask=mask)


SPACE: Space = {
    "kwargs": {"BT": [4, 8, 16, 32, 64], "NH": [1, 2, 4, 16]},
    "num_warps": [1, 2, 4, 8],
    "num_stages": [2],
    "where": lambda p: 2 * p["num_warps"] <= p["BT"] <= 32 * p["num_warps"],
}


def _make(
    shape: tuple[int, ...], tiny: tuple[int, ...], interleaved: bool, device: str, small: bool = False
) -> Data:
    b, t, h, d = tiny if small else shape
    x = normal((b, t, h, d), device, dtype=torch.bfloat16, seed=1)
    angle = normal((t, d // 2), device, dtype=torch.float32, seed=2, scale=3.0)
    y = unset((b, t, h, d), device, dtype=torch.bfloat16)
    return {
        "args": (x, angle.cos(), angle.sin(), y, t, h),
        "kwargs": {"R": d // 2, "INTERLEAVED": interleaved},
        "grid": lambda meta: (triton.cdiv(h, meta["NH"]), triton.cdiv(t, meta["BT"]), b),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, cos, sin = data["args"][:3]
    cos, sin = cos[:, None], sin[:, None]
    if data["kwargs"]["INTERLEAVED"]:
        x0, x1 = x[..., 0::2].float(), x[..., 1::2].float()
        return (torch.stack([x0 * cos - x1 * sin, x0 * sin + x1 * cos], -1).flatten(-2),)
    x0, x1 = x.float().chunk(2, -1)
    return (torch.cat([x0 * cos - x1 * sin, x0 * sin + x1 * cos], -1),)


CASES = [
    Case(
        name=f"rotary_steps/{b}x{t}x{h}x{d}" + ("-interleaved" if interleaved else ""),
        kernel=rotary_steps,
        key=("T", "H", "R"),
        space=SPACE,
        make=partial(_make, (b, t, h, d), (2, 21, 3, 32), interleaved),
        reference=_reference,
        tolerance=(2e-2, 1e-2),
        flops=3.0 * b * t * h * d,
        bytes=4.0 * b * t * h * d + 4.0 * t * d,
    )
    for b, t, h, d, interleaved in [
        (1, 2048, 32, 128, False),
        (8, 2048, 32, 128, False),
        (1, 32768, 16, 128, False),
        (64, 16, 32, 128, False),
        (4, 4096, 48, 128, False),
        (2, 16384, 64, 128, False),
        (1, 4096, 16, 128, False),
        (1, 8192, 32, 128, True),
        (16, 1024, 16, 128, True),
    ]
]
