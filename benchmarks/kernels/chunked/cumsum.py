"""Cumulative sums of gates inside chunks: one gate per head, and one log-sigmoid gate per channel."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.chunked.common import join, load_block, split, store_block

FAMILY, HAND = "scan", "chunked"
CHUNK = 64


@triton.jit
def chunk_local_cumsum(
    g,
    o,
    T,
    H,
    BT: tl.constexpr,
    REVERSE: tl.constexpr,
    BH: tl.constexpr,
    NC: tl.constexpr,
):
    i_h, i_s, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    for i_c in range(NC):
        i_t = i_s * NC + i_c
        b_g = load_block(g + i_b * T * H, T, H, H, 1, i_t * BT, i_h * BH, BT, BH).to(tl.float32)
        b_o = tl.cumsum(b_g, axis=0)
        if REVERSE:
            b_o = tl.sum(b_g, axis=0)[None, :] - b_o + b_g
        store_block(o + i_b * T * H, b_o, T, H, H, 1, i_t * BT, i_h * BH, BT, BH)


@triton.jit
def chunk_gate_cumsum(
    s,
    o,
    normalizer,
    T,
    H,
    S,
    BT: tl.constexpr,
    BS: tl.constexpr,
    USE_DOT: tl.constexpr,
):
    i_s, i_t, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_h = i_bh // H, i_bh % H
    offset = (i_b * T * H + i_h) * S
    b_s = load_block(s + offset, T, S, H * S, 1, i_t * BT, i_s * BS, BT, BS).to(tl.float32)
    # log(sigmoid(s)), in the form that does not overflow.
    b_s = (tl.minimum(b_s, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(b_s)))) / normalizer
    if USE_DOT:
        o_i = tl.arange(0, BT)
        m_s = tl.where(o_i[:, None] >= o_i[None, :], 1.0, 0.0)
        b_o = tl.dot(m_s, b_s)
    else:
        b_o = tl.cumsum(b_s, axis=0)
    store_block(o + offset, b_o, T, S, H * S, 1, i_t * BT, i_s * BS, BT, BS)


SCALAR_SPACE: Space = {
    "kwargs": {"BH": [4, 8, 16, 64], "NC": [1, 2, 8]},
    "num_warps": [1, 2, 4, 8],
    "num_stages": [2],
}
VECTOR_SPACE: Space = {
    "kwargs": {"BS": [16, 32, 64, 128, 256], "USE_DOT": [False, True]},
    "num_warps": [1, 2, 4, 8],
    "num_stages": [3],
    "where": lambda p: p["BS"] <= 128 * p["num_warps"],
}


def _make(shape: tuple[int, ...], tiny: tuple[int, ...], device: str, small: bool = False) -> Data:
    b, t, h = tiny if small else shape
    g = normal((b, t, h), device, dtype=torch.float32, seed=1)
    o = unset((b, t, h), device, dtype=torch.float32)
    return {
        "args": (g, o, t, h),
        "kwargs": {"BT": CHUNK, "REVERSE": False},
        "grid": lambda meta: (triton.cdiv(h, meta["BH"]), triton.cdiv(t, CHUNK * meta["NC"]), b),
        "outputs": (o,),
    }


def _make_gate(shape: tuple[int, ...], tiny: tuple[int, ...], device: str, small: bool = False) -> Data:
    b, t, h, s = tiny if small else shape
    x = normal((b, t, h, s), device, dtype=torch.bfloat16, seed=1)
    o = unset((b, t, h, s), device, dtype=torch.float32)
    return {
        "args": (x, o, 16.0, t, h, s),
        "kwargs": {"BT": CHUNK},
        "grid": lambda meta: (triton.cdiv(s, meta["BS"]), triton.cdiv(t, CHUNK), b * h),
        "outputs": (o,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    g = data["args"][0]
    return (join(split(g, CHUNK).cumsum(2), g.shape[1]),)


def _reference_gate(data: Data) -> tuple[torch.Tensor, ...]:
    s, _, normalizer = data["args"][:3]
    gates = torch.nn.functional.logsigmoid(s.float()) / normalizer
    return (join(split(gates, CHUNK).cumsum(2), s.shape[1]),)


CASES = [
    Case(
        name=f"chunk_local_cumsum/{b}x{t}x{h}",
        kernel=chunk_local_cumsum,
        key=("T", "H"),
        space=SCALAR_SPACE,
        make=partial(_make, (b, t, h), (2, 150, 20)),
        reference=_reference,
        tolerance=(1e-3, 1e-3),
        flops=1.0 * b * t * h,
        bytes=8.0 * b * t * h,
    )
    for b, t, h in [
        (8, 2048, 16),
        (1, 32768, 32),
        (4, 8192, 64),
        (32, 4096, 16),
        (16, 16384, 64),
        (64, 8192, 32),
        (2, 65536, 48),
        (1, 4096, 128),
        (256, 1024, 80),
    ]
] + [
    Case(
        name=f"chunk_gate_cumsum/{b}x{t}x{h}x{s}",
        kernel=chunk_gate_cumsum,
        key=("T", "H", "S"),
        space=VECTOR_SPACE,
        make=partial(_make_gate, (b, t, h, s), (2, 70, 2, 40)),
        reference=_reference_gate,
        tolerance=(5e-3, 5e-3),
        flops=6.0 * b * t * h * s,
        bytes=6.0 * b * t * h * s,
    )
    for b, t, h, s in [
        (1, 2048, 16, 64),
        (8, 2048, 16, 128),
        (1, 16384, 16, 256),
        (4, 4096, 32, 64),
        (2, 8192, 16, 512),
        (32, 1024, 32, 128),
        (16, 4096, 16, 256),
        (1, 65536, 32, 64),
        (4, 1024, 16, 256),
    ]
]
