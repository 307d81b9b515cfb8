"""Forward substitution of the small unit lower triangular system that every chunk of a delta rule solves."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.chunked.common import join, load_block, load_steps, split, store_block

FAMILY, HAND = "linear_attention", "chunked"
CHUNK = 64


@triton.jit
def solve_unit_lower(
    A,
    v,
    beta,
    u,
    T,
    H,
    V,
    BT: tl.constexpr,
    BV: tl.constexpr,
    DOUBLING: tl.constexpr,
):
    i_v, i_t, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_h = i_bh // H, i_bh % H
    A += (i_b * T * H + i_h) * BT
    v += (i_b * T * H + i_h) * V
    u += (i_b * T * H + i_h) * V
    o_i = tl.arange(0, BT)
    b_u = load_block(v, T, V, H * V, 1, i_t * BT, i_v * BV, BT, BV).to(tl.float32)
    b_u *= load_steps(beta + i_b * T * H + i_h, T, H, i_t * BT, BT)[:, None]
    if DOUBLING:
        # The inverse of I + A is (I + N)(I + N^2)(I + N^4)... with N = -A, because N^BT is zero.
        b_N = -load_block(A, T, BT, H * BT, 1, i_t * BT, 0, BT, BT)
        for _ in tl.static_range(5):
            b_u += tl.dot(b_N, b_u)
            b_N = tl.dot(b_N, b_N)
        b_u += tl.dot(b_N, b_u)
    else:
        for i in range(1, min(BT, T - i_t * BT)):
            b_a = tl.load(A + (i_t * BT + i) * H * BT + o_i)
            b_r = tl.sum(b_a[:, None] * b_u, 0)
            b_u = tl.where((o_i == i)[:, None], b_u - b_r[None, :], b_u)
    store_block(u, b_u, T, V, H * V, 1, i_t * BT, i_v * BV, BT, BV)


SPACE: Space = {
    "kwargs": {"BV": [16, 32, 64, 128], "DOUBLING": [False, True]},
    "num_warps": [1, 2, 4, 8],
    "num_stages": [1, 3],
    "where": lambda p: (
        p["BV"] <= 32 * p["num_warps"]
        and not (p["DOUBLING"] and (p["num_stages"] == 3 or p["num_warps"] == 1))
    ),
}


def _make(shape: tuple[int, ...], tiny: tuple[int, ...], device: str, small: bool = False) -> Data:
    b, t, h, dv = tiny if small else shape
    a = normal((b, t, h, CHUNK), device, dtype=torch.float32, seed=1, scale=0.08)
    steps = torch.arange(t, device=device) % CHUNK
    a *= steps[:, None, None] > torch.arange(CHUNK, device=device)[None, None, :]
    v = normal((b, t, h, dv), device, dtype=torch.bfloat16, seed=2)
    beta = normal((b, t, h), device, dtype=torch.float32, seed=3).sigmoid()
    u = unset((b, t, h, dv), device, dtype=torch.bfloat16)
    return {
        "args": (a, v, beta, u, t, h, dv),
        "kwargs": {"BT": CHUNK},
        "grid": lambda meta: (triton.cdiv(dv, meta["BV"]), triton.cdiv(t, CHUNK), b * h),
        "outputs": (u,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    a, v, beta, _, t = data["args"][:5]
    want = []
    for i in range(a.shape[0]):
        matrix = split(a[i : i + 1], CHUNK).transpose(2, 3)
        right = split(v[i : i + 1].float() * beta[i : i + 1, ..., None], CHUNK).transpose(2, 3)
        solved = torch.linalg.solve_triangular(matrix, right, upper=False, unitriangular=True)
        want.append(join(solved.transpose(2, 3), t))
    return (torch.cat(want),)


CASES = [
    Case(
        name=f"solve_unit_lower/{b}x{t}x{h}x{dv}",
        kernel=solve_unit_lower,
        key=("T", "H", "V"),
        space=SPACE,
        make=partial(_make, (b, t, h, dv), (1, 70, 1, 24)),
        reference=_reference,
        tolerance=(3e-2, 3e-2),
        flops=1.0 * b * t * h * dv * CHUNK,
        bytes=b * t * h * (4.0 * CHUNK + 4.0 * dv + 4.0),
    )
    for b, t, h, dv in [
        (1, 2048, 16, 128),
        (8, 2048, 16, 128),
        (1, 16384, 32, 128),
        (4, 4096, 32, 64),
        (2, 8192, 16, 256),
        (16, 1024, 48, 128),
        (1, 32768, 16, 64),
        (64, 512, 16, 64),
        (1, 4096, 16, 512),
    ]
]
