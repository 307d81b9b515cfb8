"""Decayed products of the keys of a chunk, strictly lower triangular: beta_i (k_i . k_j) exp(g_i - g_j)."""

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
def chunk_scaled_kkt(
    k,
    beta,
    g,
    A,
    T,
    H,
    K,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
):
    i_r, i_t, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_h = i_bh // H, i_bh % H
    k += (i_b * T * H + i_h) * K
    g += i_b * T * H + i_h
    beta += i_b * T * H + i_h
    A += (i_b * T * H + i_h) * BT
    first = i_t * BT + i_r * BC

    b_b = load_steps(beta, T, H, first, BC)
    b_A = tl.zeros([BC, BT], dtype=tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        b_k = load_block(k, T, K, H * K, 1, first, i_k * BK, BC, BK)
        b_kt = load_block(k, K, T, 1, H * K, i_k * BK, i_t * BT, BK, BT)
        b_A += tl.dot((b_k * b_b[:, None]).to(b_kt.dtype), b_kt)

    b_g = load_steps(g, T, H, first, BC)
    b_gt = load_steps(g, T, H, i_t * BT, BT)
    m_A = (i_r * BC + tl.arange(0, BC))[:, None] > tl.arange(0, BT)[None, :]
    b_A = tl.where(m_A, b_A * tl.exp(b_g[:, None] - b_gt[None, :]), 0.0)
    store_block(A, b_A, T, BT, H * BT, 1, first, 0, BC, BT)


SPACE: Space = {
    "kwargs": {"BC": [16, 32, 64], "BK": [32, 64, 128]},
    "num_warps": [2, 4, 8],
    "num_stages": [2, 4],
}


def _make(shape: tuple[int, ...], tiny: tuple[int, ...], device: str, small: bool = False) -> Data:
    b, t, h, d = tiny if small else shape
    k = normal((b, t, h, d), device, dtype=half(small), seed=1, scale=d**-0.5)
    beta = normal((b, t, h), device, dtype=torch.float32, seed=2).sigmoid()
    g = log_decay(b, t, h, CHUNK, device, seed=3)
    out = unset((b, t, h, CHUNK), device, dtype=torch.float32)
    return {
        "args": (k, beta, g, out, t, h, d),
        "kwargs": {"BT": CHUNK},
        "grid": lambda meta: (triton.cdiv(CHUNK, meta["BC"]), triton.cdiv(t, CHUNK), b * h),
        "outputs": (out,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    k, beta, g = (split(x.float(), CHUNK, edge=True) for x in data["args"][:3])
    k[:, -1, (data["args"][4] - 1) % CHUNK + 1 :] = 0
    products = torch.einsum("bnihd,bnjhd->bnihj", k, k) * beta[..., None]
    decay = (g[..., None] - g.transpose(2, 3)[:, :, None]).exp()
    rows = torch.arange(CHUNK, device=k.device)
    keep = rows[:, None, None] > rows[None, None, :]
    return (join(torch.where(keep, products * decay, 0.0), data["args"][4]),)


CASES = [
    Case(
        name=f"chunk_scaled_kkt/{b}x{t}x{h}x{d}",
        kernel=chunk_scaled_kkt,
        key=("T", "H", "K"),
        space=SPACE,
        make=partial(_make, (b, t, h, d), (1, 90, 2, 40)),
        reference=_reference,
        tolerance=(2e-2, 2e-2),
        flops=1.0 * b * t * h * d * CHUNK,
        bytes=b * t * h * (2.0 * d + 8.0 + 4.0 * CHUNK),
    )
    for b, t, h, d in [
        (1, 2048, 16, 128),
        (8, 2048, 16, 128),
        (1, 16384, 32, 128),
        (4, 4096, 16, 256),
        (2, 8192, 32, 64),
        (16, 4096, 32, 128),
        (1, 65536, 16, 64),
        (32, 512, 48, 128),
        (1, 8192, 16, 512),
    ]
]
