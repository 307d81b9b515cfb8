"""Walsh-Hadamard transform of rows: two products with sign matrices made of parities of i & j."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "gemm", "vision"


@triton.jit
def _signs(N: tl.constexpr):
    # +1 or -1 by the parity of the bits that i and j share.
    bits = tl.arange(0, N)[:, None] & tl.arange(0, N)[None, :]
    bits ^= bits >> 8
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    return (1 - 2 * (bits & 1)).to(tl.float16)


@triton.jit
def vis_hadamard(x_ptr, y_ptr, rows, scale_a, scale_b, N: tl.constexpr, A: tl.constexpr, ROWS: tl.constexpr):
    B: tl.constexpr = N // A
    left = _signs(A)
    right = _signs(B)
    offset = tl.arange(0, A)[:, None] * B + tl.arange(0, B)[None, :]
    first = tl.program_id(0) * ROWS
    for row in range(first, tl.minimum(first + ROWS, rows)):
        x = tl.load(x_ptr + row * N + offset)
        half = (tl.dot(left, x) * scale_a).to(tl.float16)
        y = tl.dot(half, right) * scale_b
        tl.store(y_ptr + row * N + offset, y.to(tl.float16))


SPACE: Space = {
    "kwargs": {"A": [16, 32, 64], "ROWS": [1, 4, 16]},
    "num_warps": [2, 4, 8],
    "num_stages": [1, 3],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    rows, n = tiny if small else shape
    x, y = normal((rows, n), device, seed=1), unset((rows, n), device)
    # The two factors together make the transform orthogonal.
    return {
        "args": (x, y, rows, 0.125, 8.0 * n**-0.5),
        "kwargs": {"N": n},
        "grid": lambda meta: (triton.cdiv(rows, meta["ROWS"]),),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, n = data["args"][0].float(), data["kwargs"]["N"]
    width = 1
    while width < n:
        pairs = x.view(-1, n // (2 * width), 2, width)
        x = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], dim=2)
        width *= 2
    return (x.reshape(-1, n) * n**-0.5,)


CASES = [
    Case(
        name=f"vis_hadamard/{rows}x{n}",
        kernel=vis_hadamard,
        key=("rows", "N"),
        space=SPACE,
        make=partial(_make, (rows, n), (5, 1024)),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        # Additions of the fast transform.
        flops=1.0 * rows * n * (n.bit_length() - 1),
        bytes=4.0 * rows * n,
    )
    for rows, n in [
        (64, 4096),
        (1024, 4096),
        (8192, 4096),
        (32768, 4096),
        (256, 1024),
        (4096, 1024),
        (20000, 1024),
        (131072, 1024),
    ]
]
