"""One decode step of the gated delta rule: every state is read, corrected by one rank and written back."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.chunked.common import log_decay

FAMILY, HAND = "linear_attention", "chunked"


@triton.jit
def fused_delta_step(
    q,
    k,
    v,
    g,
    beta,
    h0,
    ht,
    o,
    scale,
    H,
    V,
    K: tl.constexpr,
    BV: tl.constexpr,
    NV: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    i_nv, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_bh = i_b * H + i_h
    o_k = tl.arange(0, K)
    b_q = tl.load(q + i_bh * K + o_k).to(tl.float32)
    b_k = tl.load(k + i_bh * K + o_k).to(tl.float32)
    if QK_NORM:
        b_q = b_q * tl.rsqrt(tl.sum(b_q * b_q) + 1e-6)
        b_k = b_k * tl.rsqrt(tl.sum(b_k * b_k) + 1e-6)
    b_q *= scale
    b_decay = tl.exp(tl.load(g + i_bh))
    b_beta = tl.load(beta + i_bh).to(tl.float32)
    for i in range(NV):
        o_v = (i_nv * NV + i) * BV + tl.arange(0, BV)
        m_v = o_v < V
        o_h = i_bh * K * V + o_k[:, None] * V + o_v[None, :]
        b_h = tl.load(h0 + o_h, mask=m_v[None, :], other=0.0).to(tl.float32) * b_decay
        b_v = tl.load(v + i_bh * V + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_v = (b_v - tl.sum(b_h * b_k[:, None], 0)) * b_beta
        b_h += b_k[:, None] * b_v[None, :]
        b_o = tl.sum(b_h * b_q[:, None], 0)
        tl.store(o + i_bh * V + o_v, b_o.to(o.dtype.element_ty), mask=m_v)
        tl.store(ht + o_h, b_h.to(ht.dtype.element_ty), mask=m_v[None, :])


SPACE: Space = {
    "kwargs": {"BV": [8, 16, 32, 64, 128], "NV": [1, 2, 4]},
    "num_warps": [1, 2, 4, 8],
    "num_stages": [1, 3],
    # A loop of a step or two has little to pipeline; more than 128 columns per program leave some idle.
    "where": lambda p: p["BV"] * p["NV"] <= 128 and (p["NV"] > 2 or p["num_stages"] == 1),
}


def _make(shape: tuple[int, ...], tiny: tuple[int, ...], device: str, small: bool = False) -> Data:
    b, h, dk, dv = tiny if small else shape
    q = normal((b, h, dk), device, dtype=torch.bfloat16, seed=1)
    k = normal((b, h, dk), device, dtype=torch.bfloat16, seed=2)
    v = normal((b, h, dv), device, dtype=torch.bfloat16, seed=3)
    g = log_decay(b, 1, h, 1, device, seed=4).view(b, h)
    beta = normal((b, h), device, dtype=torch.float32, seed=5).sigmoid()
    h0 = normal((b, h, dk, dv), device, dtype=torch.float32, seed=6)
    ht = unset((b, h, dk, dv), device, dtype=torch.float32)
    o = unset((b, h, dv), device, dtype=torch.bfloat16)
    return {
        "args": (q, k, v, g, beta, h0, ht, o, dk**-0.5, h, dv),
        "kwargs": {"K": dk, "QK_NORM": True},
        "grid": lambda meta: (triton.cdiv(dv, meta["BV"] * meta["NV"]), h, b),
        "outputs": (o, ht),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    q, k, v, g, beta, h0, _, _, scale = data["args"][:9]
    q, k, v = q.float(), k.float(), v.float()
    q = q * (q.square().sum(-1, keepdim=True) + 1e-6).rsqrt() * scale
    k = k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    state = h0 * g.exp()[..., None, None]
    error = (v - torch.einsum("bhkv,bhk->bhv", state, k)) * beta[..., None]
    state += k[..., None] * error[..., None, :]
    return torch.einsum("bhkv,bhk->bhv", state, q), state


CASES = [
    Case(
        name=f"fused_delta_step/{b}x{h}x{dk}x{dv}",
        kernel=fused_delta_step,
        key=("H", "V", "K"),
        space=SPACE,
        make=partial(_make, (b, h, dk, dv), (2, 2, 64, 40)),
        reference=_reference,
        tolerance=(2e-2, 1e-2),
        flops=7.0 * b * h * dk * dv,
        bytes=b * h * (8.0 * dk * dv + 4.0 * dk + 4.0 * dv + 8.0),
    )
    for b, h, dk, dv in [
        (1, 32, 128, 128),
        (8, 32, 128, 128),
        (64, 32, 128, 128),
        (256, 32, 128, 128),
        (1, 16, 128, 256),
        (16, 16, 128, 512),
        (128, 48, 128, 256),
        (32, 64, 64, 64),
        (512, 16, 64, 128),
    ]
]
