"""Out-of-place transpose of a 2-D fp32 matrix, one tile a program."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "transpose", "tutorial"


@triton.jit
def transpose_kernel(src, dst, ynumel, xnumel, YBLOCK: tl.constexpr, XBLOCK: tl.constexpr):
    y = tl.program_id(1) * YBLOCK + tl.arange(0, YBLOCK)
    x = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    inside = (y[:, None] < ynumel) & (x[None, :] < xnumel)
    tile = tl.load(src + y[:, None] * xnumel + x[None, :], mask=inside)
    tl.store(dst + x[:, None] * ynumel + y[None, :], tl.trans(tile), mask=tl.trans(inside))


SPACE: Space = {
    "kwargs": {"YBLOCK": [8, 16, 32, 64, 128], "XBLOCK": [8, 16, 32, 64, 128]},
    "num_warps": [1, 2, 4, 8],
    "num_stages": [1],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    rows, cols = tiny if small else shape
    src = normal((rows, cols), device, dtype=torch.float32, seed=1)
    dst = unset((cols, rows), device, dtype=torch.float32)
    return {
        "args": (src, dst, rows, cols),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(cols, meta["XBLOCK"]), triton.cdiv(rows, meta["YBLOCK"])),
        "outputs": (dst,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    return (data["args"][0].T,)


CASES = [
    Case(
        name=f"transpose/{rows}x{cols}",
        kernel=transpose_kernel,
        key=("ynumel", "xnumel"),
        space=SPACE,
        make=partial(_make, (rows, cols), tiny),
        reference=_reference,
        tolerance=(0.0, 0.0),
        flops=0.0,
        bytes=4.0 * 2 * rows * cols,
    )
    for (rows, cols), tiny in [((16384, 8192), (70, 50)), ((4096, 4096), (64, 64)), ((50257, 768), (5, 131))]
]
