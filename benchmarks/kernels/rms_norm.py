"""Residual add fused with RMS normalisation, in the idiom of Inductor's looped reductions."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

if TYPE_CHECKING:
    import torch

FAMILY, HAND = "norm", "inductor"


@triton.jit
def add_rms_norm(
    in_ptr0,
    in_ptr1,
    in_ptr2,
    out_ptr0,
    out_ptr1,
    eps,
    xnumel,
    rnumel,
    XBLOCK: tl.constexpr,
    RBLOCK: tl.constexpr,
):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    xmask = xindex < xnumel
    rbase = tl.arange(0, RBLOCK)[None, :]
    _squares = tl.full([XBLOCK, RBLOCK], 0, tl.float32)
    for roffset in range(0, rnumel, RBLOCK):
        rindex = roffset + rbase
        rmask = rindex < rnumel
        tmp0 = tl.load(in_ptr0 + (rindex + rnumel * xindex), rmask & xmask, other=0.0).to(tl.float32)
        tmp1 = tl.load(in_ptr1 + (rindex + rnumel * xindex), rmask & xmask, other=0.0).to(tl.float32)
        tmp2 = tmp0 + tmp1
        _squares = tl.where(rmask & xmask, _squares + tmp2 * tmp2, _squares)
        tl.store(out_ptr0 + (rindex + rnumel * xindex), tmp2, rmask & xmask)
    squares = tl.sum(_squares, 1)[:, None]
    scale = tl.rsqrt(squares / rnumel + eps)
    # The sum is formed again from its terms: reading what this program just wrote needs a barrier.
    for roffset in range(0, rnumel, RBLOCK):
        rindex = roffset + rbase
        rmask = rindex < rnumel
        tmp3 = tl.load(
            in_ptr0 + (rindex + rnumel * xindex), rmask & xmask, other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)
        tmp4 = tl.load(
            in_ptr1 + (rindex + rnumel * xindex), rmask & xmask, other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)
        tmp5 = tl.load(in_ptr2 + rindex, rmask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        tl.store(out_ptr1 + (rindex + rnumel * xindex), (tmp3 + tmp4) * scale * tmp5, rmask & xmask)


SPACE: Space = {
    "kwargs": {"XBLOCK": [1, 2, 4, 8], "RBLOCK": [256, 512, 1024, 2048, 4096]},
    "num_warps": [2, 4, 8, 16],
    "num_stages": [1],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    tokens, hidden = tiny if small else shape
    x, residual = normal((tokens, hidden), device, seed=1), normal((tokens, hidden), device, seed=2)
    weight = normal((hidden,), device, seed=3)
    added, y = unset((tokens, hidden), device), unset((tokens, hidden), device)
    return {
        "args": (x, residual, weight, added, y, 1e-6, tokens, hidden),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(tokens, meta["XBLOCK"]),),
        "outputs": (added, y),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, residual, weight, _, _, eps = data["args"][:6]
    added = x.float() + residual.float()
    return added, added * (added.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()


CASES = [
    Case(
        name=f"rms_norm/{tokens}x{hidden}",
        kernel=add_rms_norm,
        key=("xnumel", "rnumel"),
        space=SPACE,
        make=partial(_make, (tokens, hidden), tiny),
        reference=_reference,
        tolerance=(5e-3, 5e-3),
        # Add, square and accumulate (2), scale, weight.
        flops=5.0 * tokens * hidden,
        bytes=2.0 * (4 * tokens * hidden + hidden),
    )
    for (tokens, hidden), tiny in [((16384, 8192), (5, 600)), ((8192, 4096), (8, 256)), ((64, 5120), (1, 90))]
]
