"""Retention in its parallel form: one pass over all earlier keys per block of queries, decay per head."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.chunked.common import half

FAMILY, HAND = "linear_attention", "chunked"


@triton.jit
def parallel_retention(
    q,
    k,
    v,
    o,
    scale,
    T,
    H,
    V,
    K: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    BV: tl.constexpr,
):
    i_v, i_t, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_h = i_bh % H
    # The decay of head i_h is 1 - 2^(-5 - i_h / 4), as a power of two.
    b_b = tl.log2(1.0 - tl.exp2(-5.0 - i_h * 0.25))
    o_q = tl.arange(0, BT)
    o_s = tl.arange(0, BS)
    o_k = tl.arange(0, K)
    o_v = i_v * BV + tl.arange(0, BV)
    m_q = i_t * BT + o_q < T
    m_v = o_v < V
    q += i_bh * T * K
    k += i_bh * T * K
    v += i_bh * T * V
    o += i_bh * T * V

    b_q = tl.load(q + (i_t * BT + o_q)[:, None] * K + o_k[None, :], mask=m_q[:, None], other=0.0)
    b_q = (b_q * scale).to(b_q.dtype)
    d_s = tl.exp2((BS - o_s) * b_b)
    d_b = tl.exp2(BS * b_b)
    b_o = tl.zeros([BT, BV], dtype=tl.float32)
    # Blocks before the diagonal are complete and need no mask along time.
    for i in range(0, i_t * BT, BS):
        b_k = tl.load(k + (i + o_s)[None, :] * K + o_k[:, None])
        b_v = tl.load(v + (i + o_s)[:, None] * V + o_v[None, :], mask=m_v[None, :], other=0.0)
        b_s = tl.dot(b_q, b_k) * d_s[None, :]
        b_o = b_o * d_b + tl.dot(b_s.to(b_v.dtype), b_v)
    b_o *= tl.exp2(o_q * b_b)[:, None]

    for i in range(0, BT, BS):
        m_s = i_t * BT + i + o_s < T
        b_k = tl.load(k + (i_t * BT + i + o_s)[None, :] * K + o_k[:, None], mask=m_s[None, :], other=0.0)
        p_v = v + (i_t * BT + i + o_s)[:, None] * V + o_v[None, :]
        b_v = tl.load(p_v, mask=m_s[:, None] & m_v[None, :], other=0.0)
        o_d = o_q[:, None] - (i + o_s)[None, :]
        b_s = tl.dot(b_q, b_k) * tl.where(o_d >= 0, tl.exp2(o_d * b_b), 0.0)
        b_o += tl.dot(b_s.to(b_v.dtype), b_v)
    p_o = o + (i_t * BT + o_q)[:, None] * V + o_v[None, :]
    tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_q[:, None] & m_v[None, :])


SPACE: Space = {
    "kwargs": {"BT": [32, 64, 128], "BS": [16, 32, 64], "BV": [64, 128]},
    "num_warps": [2, 4, 8],
    "num_stages": [2, 3],
    "where": lambda p: p["BS"] <= p["BT"] <= 16 * p["num_warps"] <= 2 * p["BT"],
}


def _make(shape: tuple[int, ...], tiny: tuple[int, ...], device: str, small: bool = False) -> Data:
    b, h, t, dk, dv = tiny if small else shape
    q = normal((b, h, t, dk), device, dtype=half(small), seed=1)
    k = normal((b, h, t, dk), device, dtype=half(small), seed=2)
    v = normal((b, h, t, dv), device, dtype=half(small), seed=3, scale=0.2)
    o = unset((b, h, t, dv), device, dtype=half(small))
    return {
        "args": (q, k, v, o, dk**-0.5, t, h, dv),
        "kwargs": {"K": dk},
        "grid": lambda meta: (triton.cdiv(dv, meta["BV"]), triton.cdiv(t, meta["BT"]), b * h),
        "outputs": (o,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    q, k, v, o, scale, t, heads = data["args"][:7]
    want = torch.empty(o.shape, dtype=torch.float32, device=o.device)
    steps = torch.arange(t, device=o.device, dtype=torch.float32)
    distance = steps[:, None] - steps[None, :]
    for i in range(heads):
        base = torch.tensor(1 - 2 ** (-5 - i / 4), dtype=torch.float64).log().item()
        decay = (distance.clamp(min=0) * base).exp().tril_() * scale
        for j in range(q.shape[0]):
            want[j, i] = ((q[j, i].float() @ k[j, i].float().T) * decay) @ v[j, i].float()
    return (want,)


CASES = [
    Case(
        name=f"parallel_retention/{b}x{h}x{t}x{dk}x{dv}",
        kernel=parallel_retention,
        key=("T", "H", "V", "K"),
        space=SPACE,
        make=partial(_make, (b, h, t, dk, dv), (1, 2, 90, 16, 40)),
        reference=_reference,
        tolerance=(1e-1, 3e-2),
        flops=1.0 * b * h * t * t * (dk + dv),
        bytes=4.0 * b * h * t * (dk + dv),
    )
    for b, h, t, dk, dv in [
        (1, 16, 1024, 64, 64),
        (1, 16, 4096, 64, 128),
        (4, 16, 2048, 64, 64),
        (32, 16, 512, 64, 128),
        (2, 16, 8192, 64, 64),
        (1, 16, 2048, 128, 256),
        (8, 32, 1024, 128, 256),
        (1, 32, 4096, 128, 128),
        (64, 16, 256, 128, 128),
    ]
]
