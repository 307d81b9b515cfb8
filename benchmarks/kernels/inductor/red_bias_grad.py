"""Gradient of a bias behind a ReLU: outer reduction over rows, split, one partial sum for each split."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "reduction", "inductor"


@triton.jit
def red_fused_sum_threshold_backward(
    in_ptr0,
    in_ptr1,
    out_ptr0,
    ks0,
    ks1,
    xnumel,
    rnumel,
    XBLOCK: tl.constexpr,
    RBLOCK: tl.constexpr,
):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    xmask = xindex < xnumel
    rbase = tl.arange(0, RBLOCK)[None, :]
    x1 = xindex // ks0
    x0 = xindex % ks0
    _tmp9 = tl.full([XBLOCK, RBLOCK], 0, tl.float32)
    x3 = xindex
    for roffset in range(0, rnumel, RBLOCK):
        rindex = roffset + rbase
        rmask = rindex < rnumel
        r2 = rindex
        tmp0 = r2 + rnumel * x1
        tmp1 = ks1
        tmp2 = tmp0 < tmp1
        tmp3 = tl.load(
            in_ptr0 + (x0 + ks0 * (r2 + rnumel * x1)),
            rmask & tmp2 & xmask,
            eviction_policy="evict_first",
            other=0.0,
        ).to(tl.float32)
        tmp4 = 0.0
        tmp5 = tmp3 <= tmp4
        tmp6 = tl.load(
            in_ptr1 + (x0 + ks0 * (r2 + rnumel * x1)),
            rmask & tmp2 & xmask,
            eviction_policy="evict_first",
            other=0.0,
        ).to(tl.float32)
        tmp7 = tl.where(tmp5, tmp4, tmp6)
        tmp8 = tl.broadcast_to(tmp7, [XBLOCK, RBLOCK])
        tmp10 = _tmp9 + tmp8
        _tmp9 = tl.where(rmask & xmask, tmp10, _tmp9)
    tmp9 = tl.sum(_tmp9, 1)[:, None]
    tl.store(out_ptr0 + x3, tmp9, xmask)


SPACE: Space = {
    "kwargs": {"XBLOCK": [4, 16, 32, 64, 128], "RBLOCK": [4, 8, 32, 64, 128]},
    "num_warps": [2, 4, 8],
    "num_stages": [1],
    "where": lambda c: 128 <= c["XBLOCK"] * c["RBLOCK"] <= 8192,
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    rows, columns, splits = tiny if small else shape
    y = normal((rows, columns), device, dtype=torch.bfloat16, seed=1)
    dy = normal((rows, columns), device, dtype=torch.bfloat16, seed=2)
    partial_sums = unset((splits, columns), device, dtype=torch.float32)
    xnumel, rnumel = columns * splits, triton.cdiv(rows, splits)
    return {
        "args": (y, dy, partial_sums, columns, rows, xnumel, rnumel),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(xnumel, meta["XBLOCK"]),),
        "outputs": (partial_sums,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    y, dy, out, *_, rnumel = data["args"]
    kept = torch.where(y <= 0, 0.0, dy.float())
    kept = torch.nn.functional.pad(kept, (0, 0, 0, rnumel * out.shape[0] - y.shape[0]))
    return (kept.view(out.shape[0], rnumel, -1).sum(1),)


CASES = [
    Case(
        name=f"red_fused_sum_threshold_backward/{r}x{c}/{s}",
        kernel=red_fused_sum_threshold_backward,
        key=("ks0", "ks1", "xnumel", "rnumel"),
        space=SPACE,
        make=partial(_make, (r, c, s), (53, 40, 3)),
        reference=_reference,
        tolerance=(1e-2, 1e-3),
        # Compare and add.
        flops=2.0 * r * c,
        bytes=2.0 * 2 * r * c + 4.0 * s * c,
    )
    for r, c, s in [
        (16384, 4096, 32),
        (16384, 16384, 16),
        (65536, 1024, 128),
        (262144, 64, 1024),
        (131072, 256, 64),
        (8192, 11008, 4),
        (4096, 768, 16),
        (2048, 2048, 8),
        (512, 14336, 2),
    ]
]
