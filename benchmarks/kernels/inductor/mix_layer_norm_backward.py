"""Backward pass of layer normalisation: rows reduced persistently, columns on the way, added atomically."""

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
def mix_fused_native_layer_norm_backward(
    in_ptr0,
    in_ptr1,
    in_ptr2,
    in_ptr3,
    in_ptr4,
    out_ptr2,
    out_ptr3,
    out_ptr4,
    xnumel,
    rnumel,
    XBLOCK: tl.constexpr,
    RSPLIT_SIZE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    RBLOCK: tl.constexpr,
):
    xoffset = tl.program_id(0) * RSPLIT_SIZE
    rindex = tl.arange(0, RBLOCK)[None, :]
    rmask = rindex < rnumel
    r1 = rindex
    accum0 = tl.full([RBLOCK], 0, tl.float32)[None, :]
    accum1 = tl.full([RBLOCK], 0, tl.float32)[None, :]
    tmp1 = tl.load(in_ptr2 + r1, rmask, eviction_policy="evict_last", other=0.0).to(tl.float32)
    for suboff in tl.range(0, RSPLIT_SIZE, XBLOCK, num_stages=NUM_STAGES):
        xindex = xoffset + suboff + tl.arange(0, XBLOCK)[:, None]
        xmask = xindex < xnumel
        x0 = xindex
        tmp0 = tl.load(in_ptr0 + (r1 + rnumel * x0), rmask & xmask, other=0.0).to(tl.float32)
        tmp3 = tl.load(in_ptr1 + (r1 + rnumel * x0), rmask & xmask, other=0.0).to(tl.float32)
        tmp4 = tl.load(in_ptr3 + x0, xmask, eviction_policy="evict_last", other=0.0)
        tmp6 = tl.load(in_ptr4 + x0, xmask, eviction_policy="evict_last", other=0.0)
        tmp2 = tmp0 * tmp1
        tmp5 = tmp3 - tmp4
        tmp7 = tmp5 * tmp6
        tmp8 = tl.where(rmask & xmask, tl.broadcast_to(tmp2, [XBLOCK, RBLOCK]), 0)
        tmp9 = tl.sum(tmp8, 1)[:, None]
        tmp10 = tmp2 * tmp7
        tmp11 = tl.where(rmask & xmask, tl.broadcast_to(tmp10, [XBLOCK, RBLOCK]), 0)
        tmp12 = tl.sum(tmp11, 1)[:, None]
        tmp13 = tmp9 / rnumel
        tmp14 = tmp2 - tmp13
        tmp15 = tmp7 * (tmp12 / rnumel)
        tmp16 = tmp14 - tmp15
        tmp17 = tmp16 * tmp6
        tl.store(out_ptr2 + (r1 + rnumel * x0), tmp17, rmask & xmask)
        accum0 += tl.sum(tl.where(xmask, tmp0 * tmp7, 0), 0)[None, :]
        accum1 += tl.sum(tl.where(xmask, tmp0, 0), 0)[None, :]
    tl.atomic_add(out_ptr3 + r1, accum0, rmask, sem="relaxed")
    tl.atomic_add(out_ptr4 + r1, accum1, rmask, sem="relaxed")


SPACE: Space = {
    "kwargs": {"XBLOCK": [1, 2, 4], "RSPLIT_SIZE": [8, 32, 128], "NUM_STAGES": [1, 3]},
    "num_warps": [4, 8, 16],
    "num_stages": [1],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    xnumel, rnumel = tiny if small else shape
    dy = normal((xnumel, rnumel), device, dtype=torch.bfloat16, seed=1)
    x = normal((xnumel, rnumel), device, dtype=torch.bfloat16, seed=2)
    weight = normal((rnumel,), device, dtype=torch.float32, seed=3)
    # As the forward pass would have stored them, near enough.
    mean = normal((xnumel,), device, dtype=torch.float32, seed=4, scale=0.05)
    rstd = normal((xnumel,), device, dtype=torch.float32, seed=5, scale=0.05) + 1
    dx = unset((xnumel, rnumel), device, dtype=torch.bfloat16)
    dw, db = (torch.zeros(rnumel, dtype=torch.float32, device=device) for _ in range(2))
    return {
        "args": (dy, x, weight, mean, rstd, dx, dw, db, xnumel, rnumel),
        "kwargs": {"RBLOCK": triton.next_power_of_2(rnumel)},
        "grid": lambda meta: (triton.cdiv(xnumel, meta["RSPLIT_SIZE"]),),
        "outputs": (dx, dw, db),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    dy, x, weight, mean, rstd = (t.float() for t in data["args"][:5])
    normed = (x - mean[:, None]) * rstd[:, None]
    scaled = dy * weight
    dx = scaled - scaled.mean(-1, keepdim=True) - normed * (scaled * normed).mean(-1, keepdim=True)
    return dx * rstd[:, None], (dy * normed).sum(0), dy.sum(0)


CASES = [
    Case(
        name=f"mix_fused_native_layer_norm_backward/{x}x{r}",
        kernel=mix_fused_native_layer_norm_backward,
        key=("xnumel", "rnumel"),
        space=SPACE,
        make=partial(_make, (x, r), (37, 100)),
        reference=_reference,
        tolerance=(2e-2, 2e-2),
        reset_to_zero=("out_ptr3", "out_ptr4"),
        flops=14.0 * x * r,
        bytes=2.0 * 3 * x * r + 4.0 * 3 * r + 4.0 * 2 * x,
    )
    for x, r in [
        (65536, 1024),
        (16384, 1024),
        (32768, 768),
        (4096, 1024),
        (512, 640),
        (16384, 4096),
        (8192, 3072),
        (2048, 4096),
        (256, 4096),
    ]
]
