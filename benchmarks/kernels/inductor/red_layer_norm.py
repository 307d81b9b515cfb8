"""Layer normalisation, forward, with the lane-wise Welford accumulators of a looped reduction."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "norm", "inductor"


@triton.jit
def welford_reduce(value, mean, m2, weight):
    delta = value - mean
    new_weight = weight + 1
    new_mean = mean + delta / new_weight
    return new_mean, m2 + delta * (value - new_mean), new_weight


@triton.jit
def welford(mean, m2, weight):
    total = tl.sum(weight, 1)[:, None]
    new_mean = tl.sum(weight * mean, 1)[:, None] / total
    delta = mean - new_mean
    return new_mean, tl.sum(m2 + weight * delta * delta, 1)[:, None], total


@triton.jit
def red_fused_native_layer_norm(
    in_ptr0,
    in_ptr1,
    in_ptr2,
    out_ptr0,
    out_ptr1,
    out_ptr2,
    xnumel,
    rnumel,
    XBLOCK: tl.constexpr,
    RBLOCK: tl.constexpr,
):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    xmask = xindex < xnumel
    rbase = tl.arange(0, RBLOCK)[None, :]
    x0 = xindex
    tmp2_mean = tl.zeros([XBLOCK, RBLOCK], tl.float32)
    tmp2_m2 = tl.zeros([XBLOCK, RBLOCK], tl.float32)
    tmp2_weight = tl.zeros([XBLOCK, RBLOCK], tl.float32)
    for roffset in range(0, rnumel, RBLOCK):
        rindex = roffset + rbase
        rmask = rindex < rnumel
        r1 = rindex
        tmp0 = tl.load(
            in_ptr0 + (r1 + rnumel * x0), rmask & xmask, eviction_policy="evict_last", other=0.0
        ).to(tl.float32)
        tmp1 = tl.broadcast_to(tmp0, [XBLOCK, RBLOCK])
        mean_next, m2_next, weight_next = welford_reduce(tmp1, tmp2_mean, tmp2_m2, tmp2_weight)
        tmp2_mean = tl.where(rmask & xmask, mean_next, tmp2_mean)
        tmp2_m2 = tl.where(rmask & xmask, m2_next, tmp2_m2)
        tmp2_weight = tl.where(rmask & xmask, weight_next, tmp2_weight)
    tmp2, tmp3, _tmp4 = welford(tmp2_mean, tmp2_m2, tmp2_weight)
    tl.store(out_ptr0 + x0, tmp2, xmask)
    tmp5 = tmp3 / rnumel
    tmp6 = 1e-05
    tmp7 = tmp5 + tmp6
    tmp8 = tl.rsqrt(tmp7)
    tl.store(out_ptr1 + x0, tmp8, xmask)
    for roffset in range(0, rnumel, RBLOCK):
        rindex = roffset + rbase
        rmask = rindex < rnumel
        r1 = rindex
        tmp9 = tl.load(
            in_ptr0 + (r1 + rnumel * x0), rmask & xmask, eviction_policy="evict_first", other=0.0
        ).to(tl.float32)
        tmp12 = tl.load(in_ptr1 + r1, rmask, eviction_policy="evict_last", other=0.0).to(tl.float32)
        tmp14 = tl.load(in_ptr2 + r1, rmask, eviction_policy="evict_last", other=0.0).to(tl.float32)
        tmp10 = tmp9 - tmp2
        tmp11 = tmp10 * tmp8
        tmp13 = tmp11 * tmp12
        tmp15 = tmp13 + tmp14
        tl.store(out_ptr2 + (r1 + rnumel * x0), tmp15, rmask & xmask)


SPACE: Space = {
    "kwargs": {"XBLOCK": [1, 2, 4, 8], "RBLOCK": [256, 512, 1024, 2048]},
    "num_warps": [2, 4, 8, 16],
    "num_stages": [1],
    "where": lambda c: c["XBLOCK"] * c["RBLOCK"] <= 2048 * c["num_warps"],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    xnumel, rnumel = tiny if small else shape
    x = normal((xnumel, rnumel), device, dtype=torch.bfloat16, seed=1, scale=2.0) + 1
    weight = normal((rnumel,), device, dtype=torch.float32, seed=2)
    bias = normal((rnumel,), device, dtype=torch.float32, seed=3)
    mean, rstd = (
        unset((xnumel, 1), device, dtype=torch.float32),
        unset((xnumel, 1), device, dtype=torch.float32),
    )
    y = unset((xnumel, rnumel), device, dtype=torch.bfloat16)
    return {
        "args": (x, weight, bias, mean, rstd, y, xnumel, rnumel),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(xnumel, meta["XBLOCK"]),),
        "outputs": (mean, rstd, y),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, weight, bias = (t.float() for t in data["args"][:3])
    variance, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    rstd = (variance + 1e-5).rsqrt()
    return mean, rstd, (x - mean) * rstd * weight + bias


CASES = [
    Case(
        name=f"red_fused_native_layer_norm/{x}x{r}",
        kernel=red_fused_native_layer_norm,
        key=("xnumel", "rnumel"),
        space=SPACE,
        make=partial(_make, (x, r), (5, 300)),
        reference=_reference,
        tolerance=(1e-2, 2e-2),
        # Welford (6, with a division), then subtract, scale twice and shift.
        flops=10.0 * x * r,
        bytes=2.0 * 2 * x * r + 4.0 * 2 * r + 4.0 * 2 * x,
    )
    for x, r in [
        (32768, 4096),
        (16384, 1024),
        (65536, 768),
        (4096, 8192),
        (2048, 12288),
        (8192, 2560),
        (512, 5120),
        (64, 16384),
        (16, 4096),
    ]
]
