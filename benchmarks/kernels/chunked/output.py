"""Outputs of every chunk from its queries and the state before it, and the gradient of its values."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.chunked.common import (
    half,
    join,
    load_block,
    load_steps,
    log_decay,
    split,
    store_block,
)

FAMILY, HAND = "linear_attention", "chunked"
CHUNK = 64


@triton.jit
def chunk_output(
    q,
    k,
    v,
    h,
    g,
    o,
    scale,
    T,
    H,
    K,
    V,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    i_v, i_t, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_h = i_bh // H, i_bh % H
    q += (i_b * T * H + i_h) * K
    k += (i_b * T * H + i_h) * K
    v += (i_b * T * H + i_h) * V
    o += (i_b * T * H + i_h) * V
    h += ((i_b * tl.cdiv(T, BT) + i_t) * H + i_h) * K * V

    b_o = tl.zeros([BT, BV], dtype=tl.float32)
    b_A = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        b_q = load_block(q, T, K, H * K, 1, i_t * BT, i_k * BK, BT, BK)
        b_k = load_block(k, K, T, 1, H * K, i_k * BK, i_t * BT, BK, BT)
        b_h = load_block(h, K, V, V, 1, i_k * BK, i_v * BV, BK, BV)
        b_o += tl.dot(b_q, b_h)
        b_A += tl.dot(b_q, b_k)
    b_g = load_steps(g + i_b * T * H + i_h, T, H, i_t * BT, BT)
    o_i = tl.arange(0, BT)
    b_A = tl.where(o_i[:, None] >= o_i[None, :], b_A * tl.exp(b_g[:, None] - b_g[None, :]), 0.0)
    b_v = load_block(v, T, V, H * V, 1, i_t * BT, i_v * BV, BT, BV)
    b_o = b_o * tl.exp(b_g)[:, None] + tl.dot(b_A.to(b_v.dtype), b_v)
    store_block(o, b_o * scale, T, V, H * V, 1, i_t * BT, i_v * BV, BT, BV)


@triton.heuristics(
    {
        "EVEN_K": lambda args: args["K"] % args["BK"] == 0,
        "EVEN_V": lambda args: args["V"] % args["BV"] == 0,
    }
)
@triton.jit
def chunk_backward_dv(
    q,
    k,
    do,
    dh,
    g,
    dv,
    scale,
    T,
    H,
    K,
    V,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_V: tl.constexpr,
):
    i_v, i_t, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_h = i_bh // H, i_bh % H
    o_t = i_t * BT + tl.arange(0, BT)
    o_v = i_v * BV + tl.arange(0, BV)
    m_t = o_t < T
    m_v = o_v < V
    q += (i_b * T * H + i_h) * K
    k += (i_b * T * H + i_h) * K
    g += i_b * T * H + i_h
    dh += ((i_b * tl.cdiv(T, BT) + i_t) * H + i_h) * K * V

    b_A = tl.zeros([BT, BT], dtype=tl.float32)
    b_dv = tl.zeros([BT, BV], dtype=tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = (o_k >= 0) if EVEN_K else (o_k < K)
        b_q = tl.load(q + o_t[None, :] * H * K + o_k[:, None], mask=m_t[None, :] & m_k[:, None], other=0.0)
        b_k = tl.load(k + o_t[:, None] * H * K + o_k[None, :], mask=m_t[:, None] & m_k[None, :], other=0.0)
        if EVEN_K and EVEN_V:
            b_dh = tl.load(dh + o_k[:, None] * V + o_v[None, :])
        else:
            b_dh = tl.load(dh + o_k[:, None] * V + o_v[None, :], mask=m_k[:, None] & m_v[None, :], other=0.0)
        b_A += tl.dot(b_k, b_q)
        b_dv += tl.dot(b_k, b_dh)
    b_g = tl.load(g + o_t * H, mask=m_t, other=0.0)
    b_gl = tl.load(g + (min((i_t + 1) * BT, T) - 1) * H)
    b_dv *= tl.exp(b_gl - b_g)[:, None]
    b_A = tl.where(o_t[:, None] <= o_t[None, :], b_A * tl.exp(b_g[None, :] - b_g[:, None]) * scale, 0.0)
    p_do = do + (i_b * T * H + i_h) * V + o_t[:, None] * H * V + o_v[None, :]
    b_do = tl.load(p_do, mask=m_t[:, None] & m_v[None, :], other=0.0)
    b_dv += tl.dot(b_A.to(b_do.dtype), b_do)
    p_dv = dv + (i_b * T * H + i_h) * V + o_t[:, None] * H * V + o_v[None, :]
    tl.store(p_dv, b_dv.to(dv.dtype.element_ty), mask=m_t[:, None] & m_v[None, :])


SPACE: Space = {
    "kwargs": {"BK": [32, 64, 128], "BV": [32, 64, 128, 256]},
    "num_warps": [2, 4, 8],
    "num_stages": [2, 3],
    "where": lambda p: p["BV"] <= 64 * p["num_warps"],
}


def _make(
    shape: tuple[int, ...], tiny: tuple[int, ...], backward: bool, device: str, small: bool = False
) -> Data:
    b, t, h, dk, dv = tiny if small else shape
    dtype = half(small)
    q = normal((b, t, h, dk), device, dtype=dtype, seed=1)
    k = normal((b, t, h, dk), device, dtype=dtype, seed=2)
    v = normal((b, t, h, dv), device, dtype=dtype, seed=3)
    states = normal((b, triton.cdiv(t, CHUNK), h, dk, dv), device, dtype=dtype, seed=4, scale=dk**-0.5)
    g = log_decay(b, t, h, CHUNK, device, seed=5)
    o = unset((b, t, h, dv), device, dtype=dtype)
    if not backward:
        states *= 4
    return {
        "args": (q, k, v, states, g, o, dk**-0.5, t, h, dk, dv),
        "kwargs": {"BT": CHUNK},
        "grid": lambda meta: (triton.cdiv(dv, meta["BV"]), triton.cdiv(t, CHUNK), b * h),
        "outputs": (o,),
    }


def _reference(backward: bool, data: Data) -> tuple[torch.Tensor, ...]:
    q, k, v, states, gates, _, scale, t = data["args"][:8]
    want = []
    # One sequence at a time: the products of all chunks are large.
    for i in range(q.shape[0]):
        qc, kc, vc = (split(x[i : i + 1].float(), CHUNK).transpose(2, 3) for x in (q, k, v))
        g = split(gates[i : i + 1], CHUNK, edge=True).transpose(2, 3)
        h = states[i : i + 1].float()
        decay = (g[..., :, None] - g[..., None, :]).tril().exp().tril()
        A = (qc @ kc.mT) * decay * scale
        if backward:
            o = A.mT @ vc + (g[..., -1:] - g).exp()[..., None] * (kc @ h)
        else:
            o = A @ vc + g.exp()[..., None] * (qc @ h) * scale
        want.append(join(o.transpose(2, 3), t))
    return (torch.cat(want),)


CASES = [
    Case(
        name=f"{getattr(kernel.fn, 'fn', kernel.fn).__name__}/{b}x{t}x{h}x{dk}x{dv}",
        kernel=kernel,
        key=("T", "H", "K", "V"),
        space=SPACE,
        make=partial(_make, (b, t, h, dk, dv), (1, 80, 1, 40, 50), kernel is chunk_backward_dv),
        reference=partial(_reference, kernel is chunk_backward_dv),
        tolerance=(1e-1, 3e-2),
        flops=b * t * h * (2.0 * dk * dv + CHUNK * (dk + dv)),
        bytes=b * h * t * (4.0 * dk + 4.0 * dv + 4.0) + 2.0 * b * h * dk * dv * (t // CHUNK),
    )
    for kernel, shapes in [
        (
            chunk_output,
            [
                (1, 2048, 16, 128, 128),
                (4, 2048, 16, 128, 128),
                (1, 16384, 32, 128, 128),
                (8, 4096, 32, 64, 64),
                (2, 8192, 16, 128, 256),
                (32, 512, 48, 64, 128),
                (1, 8192, 16, 256, 512),
                (16, 4096, 16, 64, 64),
                (1, 65536, 16, 64, 128),
            ],
        ),
        (
            chunk_backward_dv,
            [
                (1, 4096, 16, 128, 128),
                (8, 2048, 16, 128, 128),
                (1, 32768, 16, 128, 128),
                (16, 1024, 32, 64, 64),
                (2, 4096, 32, 128, 256),
                (64, 512, 16, 64, 128),
                (2, 4096, 16, 256, 512),
                (4, 8192, 48, 64, 64),
                (1, 1024, 16, 256, 256),
            ],
        ),
    ]
    for b, t, h, dk, dv in shapes
]
