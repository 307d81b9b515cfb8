"""The state at the start of every chunk: a loop over chunks that carries a BK x BV tile in registers."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.chunked.common import half, load_block, load_steps, log_decay, split, store_block

FAMILY, HAND = "linear_attention", "chunked"
CHUNK = 64


@triton.heuristics({"EVEN_K": lambda args: args["K"] % args["BK"] == 0})
@triton.jit
def chunk_state_recurrence(
    k,
    v,
    g,
    h,
    ht,
    T,
    H,
    K,
    V,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    i_k, i_v, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_h = i_bh // H, i_bh % H
    NT = tl.cdiv(T, BT)
    k += (i_b * T * H + i_h) * K
    v += (i_b * T * H + i_h) * V
    g += i_b * T * H + i_h
    o_t = tl.arange(0, BT)
    o_k = i_k * BK + tl.arange(0, BK)

    b_h = tl.zeros([BK, BV], dtype=tl.float32)
    for i_t in range(0, NT):
        p_h = h + ((i_b * NT + i_t) * H + i_h) * K * V
        store_block(p_h, b_h, K, V, V, 1, i_k * BK, i_v * BV, BK, BV)
        o_s = i_t * BT + o_t
        p_k = k + o_s[None, :] * H * K + o_k[:, None]
        if EVEN_K:
            b_k = tl.load(p_k, mask=o_s[None, :] < T, other=0.0)
        else:
            b_k = tl.load(p_k, mask=(o_s[None, :] < T) & (o_k[:, None] < K), other=0.0)
        b_v = load_block(v, T, V, H * V, 1, i_t * BT, i_v * BV, BT, BV)
        last = min((i_t + 1) * BT, T) - 1
        b_gl = tl.load(g + last * H)
        b_g = load_steps(g, T, H, i_t * BT, BT)
        b_v = (b_v * tl.exp(b_gl - b_g)[:, None]).to(b_k.dtype)
        b_h *= tl.exp(b_gl)
        b_h += tl.dot(b_k, b_v)
    store_block(ht + i_bh * K * V, b_h, K, V, V, 1, i_k * BK, i_v * BV, BK, BV)


SPACE: Space = {
    "kwargs": {"BK": [32, 64, 128], "BV": [32, 64, 128]},
    "num_warps": [2, 4, 8],
    "num_stages": [1, 2, 3],
    # Two warps cannot hold the largest tiles.
    "where": lambda p: (
        p["BK"] * p["BV"] <= 2048 * p["num_warps"] and p["num_warps"] * 512 <= p["BK"] * p["BV"]
    ),
}


def _make(shape: tuple[int, ...], tiny: tuple[int, ...], device: str, small: bool = False) -> Data:
    b, t, h, dk, dv = tiny if small else shape
    k = normal((b, t, h, dk), device, dtype=half(small), seed=1, scale=dk**-0.5)
    v = normal((b, t, h, dv), device, dtype=half(small), seed=2)
    g = log_decay(b, t, h, CHUNK, device, seed=3)
    states = unset((b, triton.cdiv(t, CHUNK), h, dk, dv), device, dtype=half(small))
    final = unset((b, h, dk, dv), device, dtype=torch.float32)
    return {
        "args": (k, v, g, states, final, t, h, dk, dv),
        "kwargs": {"BT": CHUNK},
        "grid": lambda meta: (triton.cdiv(dk, meta["BK"]), triton.cdiv(dv, meta["BV"]), b * h),
        "outputs": (states, final),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    k, v, g, states, final = data["args"][:5]
    k, v, g = split(k, CHUNK), split(v, CHUNK), split(g, CHUNK, edge=True)
    want = torch.empty(states.shape, device=k.device)
    state = torch.zeros(final.shape, device=k.device)
    for n in range(k.shape[1]):
        want[:, n] = state
        weight = (g[:, n, -1:] - g[:, n]).exp()[..., None]
        added = torch.einsum("bihk,bihv->bhkv", k[:, n].float(), v[:, n].float() * weight)
        state = state * g[:, n, -1].exp()[..., None, None] + added
    return want, state


CASES = [
    Case(
        name=f"chunk_state_recurrence/{b}x{t}x{h}x{dk}x{dv}",
        kernel=chunk_state_recurrence,
        key=("T", "H", "K", "V"),
        space=SPACE,
        make=partial(_make, (b, t, h, dk, dv), (1, 100, 2, 40, 50)),
        reference=_reference,
        tolerance=(3e-2, 3e-2),
        flops=2.0 * b * t * h * dk * dv,
        bytes=b * h * (t * (2.0 * dk + 2.0 * dv + 4.0) + dk * dv * (2.0 * (t // CHUNK) + 4.0)),
    )
    for b, t, h, dk, dv in [
        (1, 2048, 16, 128, 128),
        (4, 2048, 16, 128, 128),
        (1, 16384, 32, 128, 128),
        (8, 4096, 32, 64, 64),
        (2, 8192, 16, 128, 256),
        (8, 1024, 32, 128, 128),
        (1, 8192, 16, 256, 512),
        (16, 2048, 48, 64, 128),
        (1, 32768, 16, 64, 64),
    ]
]
