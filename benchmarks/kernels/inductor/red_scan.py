"""Running log-sum-exp along rows: an associative scan of each block, with the block totals carried over."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "scan", "inductor"


@triton.jit
def _triton_helper_fn_logaddexp0(arg0_0, arg1_0):
    tmp0 = tl.minimum(arg0_0, arg1_0)
    tmp1 = tl.maximum(arg0_0, arg1_0)
    tmp2 = tmp0 > float("-inf")
    tmp3 = tl.where(tmp2, tmp0 - tmp1, 0.0)
    tmp4 = tl.log(1.0 + tl.exp(tmp3))
    return tl.where(tmp2, tmp1 + tmp4, tmp1)


@triton.jit
def red_fused_logcumsumexp(in_ptr0, out_ptr0, xnumel, rnumel, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    xmask = xindex < xnumel
    rbase = tl.arange(0, RBLOCK)[None, :]
    x0 = xindex
    tmp3_carry = tl.full([XBLOCK, 1], float("-inf"), tl.float32)
    for roffset in range(0, rnumel, RBLOCK):
        rindex = roffset + rbase
        rmask = rindex < rnumel
        r1 = rindex
        tmp0 = tl.load(
            in_ptr0 + (r1 + rnumel * x0),
            rmask & xmask,
            eviction_policy="evict_first",
            other=float("-inf"),
        ).to(tl.float32)
        tmp1 = tl.broadcast_to(tmp0, [XBLOCK, RBLOCK])
        tmp2 = tl.associative_scan(tmp1, 1, _triton_helper_fn_logaddexp0)
        tmp3 = _triton_helper_fn_logaddexp0(tl.broadcast_to(tmp3_carry, [XBLOCK, RBLOCK]), tmp2)
        tmp3_carry = tl.max(tmp3, 1)[:, None]  # It never falls, so its last value is its largest.
        tl.store(out_ptr0 + (r1 + rnumel * x0), tmp3, rmask & xmask)


SPACE: Space = {
    "kwargs": {"XBLOCK": [1, 2, 8, 32], "RBLOCK": [32, 128, 512, 2048]},
    "num_warps": [1, 2, 4, 8],
    "num_stages": [1],
    "where": lambda c: 64 <= c["XBLOCK"] * c["RBLOCK"] <= 1024 * c["num_warps"],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    xnumel, rnumel = tiny if small else shape
    x = normal((xnumel, rnumel), device, dtype=torch.float32, seed=1, scale=2.0)
    y = unset((xnumel, rnumel), device, dtype=torch.float32)
    return {
        "args": (x, y, xnumel, rnumel),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(xnumel, meta["XBLOCK"]),),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    return (data["args"][0].logcumsumexp(-1),)


CASES = [
    Case(
        name=f"red_fused_logcumsumexp/{x}x{r}",
        kernel=red_fused_logcumsumexp,
        key=("xnumel", "rnumel"),
        space=SPACE,
        make=partial(_make, (x, r), (3, 70)),
        reference=_reference,
        tolerance=(1e-3, 1e-3),
        # Compare, subtract, exponentiate, logarithm, add.
        flops=5.0 * x * r,
        bytes=4.0 * 2 * x * r,
    )
    for x, r in [
        (32768, 1024),
        (65536, 256),
        (262144, 64),
        (8192, 4096),
        (4096, 1008),
        (1024, 8192),
        (512, 2048),
        (64, 16384),
        (16, 4096),
    ]
]
