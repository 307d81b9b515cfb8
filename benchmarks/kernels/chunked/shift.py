"""Token shift of a recurrent layer: every channel is mixed with the one a step earlier, three times over."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "elementwise", "chunked"


@triton.heuristics({"EVEN_D": lambda args: args["D"] % args["BD"] == 0})
@triton.jit
def token_shift_lerp(
    x,
    state,
    mu_r,
    mu_k,
    mu_v,
    r,
    k,
    v,
    T,
    D,
    BT: tl.constexpr,
    BD: tl.constexpr,
    NT: tl.constexpr,
    EVEN_D: tl.constexpr,
):
    i_d, i_s, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_d = i_d * BD + tl.arange(0, BD)
    m_d = (o_d >= 0) if EVEN_D else (o_d < D)
    x += i_b * T * D
    b_r = tl.load(mu_r + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    b_k = tl.load(mu_k + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    b_v = tl.load(mu_v + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    b_s = tl.load(state + i_b * D + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    for i in range(NT):
        o_t = (i_s * NT + i) * BT + tl.arange(0, BT)[:, None]
        mask = (o_t < T) & m_d[None, :]
        b_x = tl.load(x + o_t * D + o_d[None, :], mask=mask, other=0.0).to(tl.float32)
        b_p = tl.load(x + (o_t - 1) * D + o_d[None, :], mask=mask & (o_t > 0), other=0.0).to(tl.float32)
        b_d = tl.where(o_t > 0, b_p, b_s) - b_x
        offset = i_b * T * D + o_t * D + o_d[None, :]
        tl.store(r + offset, (b_x + b_d * b_r).to(r.dtype.element_ty), mask=mask)
        tl.store(k + offset, (b_x + b_d * b_k).to(k.dtype.element_ty), mask=mask)
        tl.store(v + offset, (b_x + b_d * b_v).to(v.dtype.element_ty), mask=mask)


SPACE: Space = {
    "kwargs": {"BT": [1, 4, 16, 32], "BD": [64, 256, 512, 1024], "NT": [1, 4]},
    "num_warps": [2, 4, 8],
    "num_stages": [2],
    "where": lambda p: 64 * p["num_warps"] <= p["BT"] * p["BD"] <= 2048 * p["num_warps"],
}


def _make(shape: tuple[int, ...], tiny: tuple[int, ...], device: str, small: bool = False) -> Data:
    b, t, d = tiny if small else shape
    x, state = normal((b, t, d), device, seed=1), normal((b, d), device, seed=2)
    mixes = [normal((d,), device, dtype=torch.float32, seed=seed).sigmoid() for seed in (3, 4, 5)]
    outputs = tuple(unset((b, t, d), device) for _ in range(3))
    return {
        "args": (x, state, *mixes, *outputs, t, d),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(d, meta["BD"]), triton.cdiv(t, meta["BT"] * meta["NT"]), b),
        "outputs": outputs,
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, state = (a.float() for a in data["args"][:2])
    delta = torch.cat([state[:, None], x[:, :-1]], 1) - x
    return tuple(x + delta * mix for mix in data["args"][2:5])


CASES = [
    Case(
        name=f"token_shift_lerp/{b}x{t}x{d}",
        kernel=token_shift_lerp,
        key=("T", "D"),
        space=SPACE,
        make=partial(_make, (b, t, d), (2, 19, 100)),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        flops=7.0 * b * t * d,
        bytes=8.0 * b * t * d + 2.0 * b * d + 12.0 * d,
    )
    for b, t, d in [
        (1, 1024, 2048),
        (8, 2048, 2048),
        (1, 32768, 2560),
        (64, 16, 4096),
        (4, 4096, 4096),
        (256, 512, 1024),
        (2, 8192, 5120),
        (1, 2048, 8192),
        (16, 4096, 768),
    ]
]
