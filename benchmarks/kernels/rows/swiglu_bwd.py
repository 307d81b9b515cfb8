"""SwiGLU, backward: both gradients and the recomputed product, columns over programs."""

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

FAMILY, HAND = "activation", "rows"


@triton.jit
def rows_swiglu_bwd(
    dC_ptr,
    A_ptr,
    B_ptr,
    dA_ptr,
    dB_ptr,
    C_ptr,
    stride,
    n_cols,
    BLOCK_SIZE: tl.constexpr,
    COL_PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
    RECOMPUTE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * stride
    first = tl.program_id(1) * BLOCK_SIZE
    for i in tl.range(first, n_cols, BLOCK_SIZE * COL_PROGRAMS, num_stages=STAGES):
        offsets = i + tl.arange(0, BLOCK_SIZE)
        mask = offsets < n_cols
        dc = tl.load(dC_ptr + row + offsets, mask=mask, other=0.0).to(tl.float32)
        a = tl.load(A_ptr + row + offsets, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(B_ptr + row + offsets, mask=mask, other=0.0).to(tl.float32)
        sig = tl.sigmoid(a)
        silu = a * sig
        tl.store(dB_ptr + row + offsets, dc * silu, mask=mask)
        tl.store(dA_ptr + row + offsets, dc * b * (silu * (1 - sig) + sig), mask=mask)
        if RECOMPUTE:
            tl.store(C_ptr + row + offsets, silu * b, mask=mask)


SPACE: Space = {
    "kwargs": {
        "BLOCK_SIZE": [256, 1024, 2048, 4096, 8192],
        "COL_PROGRAMS": [1, 4],
        "STAGES": [1, 2, 4],
    },
    "num_warps": [4, 8],
    "num_stages": [1],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    rows, cols = tiny if small else shape
    dc, a, b = (normal((rows, cols), device, seed=seed) for seed in (1, 2, 3))
    da, db, c = (unset((rows, cols), device) for _ in range(3))
    return {
        "args": (dc, a, b, da, db, c, a.stride(0), cols),
        "kwargs": {"RECOMPUTE": True},
        "grid": lambda meta: (rows, meta["COL_PROGRAMS"]),
        "outputs": (da, db, c),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    dc, a, b = (t.float() for t in data["args"][:3])
    sig = a.sigmoid()
    silu = a * sig
    return dc * b * (silu * (1 - sig) + sig), dc * silu, silu * b


CASES = [
    Case(
        name=f"rows_swiglu_bwd/{rows}x{cols}",
        kernel=rows_swiglu_bwd,
        key=("n_cols",),
        space=SPACE,
        make=partial(_make, (rows, cols), tiny),
        reference=_reference,
        tolerance=(5e-3, 5e-3),
        flops=12.0 * rows * cols,
        bytes=12.0 * rows * cols,
    )
    for (rows, cols), tiny in [
        ((8192, 14336), (3, 900)),
        ((4096, 11008), (2, 100)),
        ((1024, 28672), (2, 100)),
        ((16384, 1408), (2, 100)),
        ((32768, 768), (2, 100)),
        ((128, 8192), (2, 100)),
        ((512, 4096), (2, 100)),
        ((2048, 18432), (2, 100)),
    ]
]
