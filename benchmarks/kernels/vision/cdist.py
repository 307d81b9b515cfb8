"""Squared distances between two sets of points in fp32: norms and TF32 products gathered in the same loop."""

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
def vis_cdist2(
    a_ptr, b_ptr, d_ptr, M, N, K, TILE_A: tl.constexpr, TILE_B: tl.constexpr, TILE_K: tl.constexpr
):
    i = tl.program_id(1) * TILE_A + tl.arange(0, TILE_A)
    j = tl.program_id(0) * TILE_B + tl.arange(0, TILE_B)
    dots = tl.zeros((TILE_A, TILE_B), dtype=tl.float32)
    aa = tl.zeros((TILE_A,), dtype=tl.float32)
    bb = tl.zeros((TILE_B,), dtype=tl.float32)
    for start in range(0, K, TILE_K):
        k = start + tl.arange(0, TILE_K)
        a = tl.load(a_ptr + i[:, None] * K + k[None, :], mask=(i < M)[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(b_ptr + j[None, :] * K + k[:, None], mask=(j < N)[None, :] & (k < K)[:, None], other=0.0)
        dots = tl.dot(a, b, dots, input_precision="tf32")
        aa += tl.sum(a * a, axis=1)
        bb += tl.sum(b * b, axis=0)
    d = tl.maximum(aa[:, None] + bb[None, :] - 2.0 * dots, 0.0)
    tl.store(d_ptr + i[:, None] * N + j[None, :], d, mask=(i < M)[:, None] & (j < N)[None, :])


SPACE: Space = {
    "kwargs": {"TILE_A": [32, 64, 128], "TILE_B": [32, 64, 128], "TILE_K": [16, 32]},
    "num_warps": [4, 8],
    "num_stages": [2, 4],
    "where": lambda c: c["num_warps"] == 4 or c["TILE_A"] * c["TILE_B"] >= 4096,
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    m, n, k = tiny if small else shape
    a = normal((m, k), device, dtype=torch.float32, seed=1, scale=k**-0.5)
    b = normal((n, k), device, dtype=torch.float32, seed=2, scale=k**-0.5)
    d = unset((m, n), device, dtype=torch.float32)
    return {
        "args": (a, b, d, m, n, k),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(n, meta["TILE_B"]), triton.cdiv(m, meta["TILE_A"])),
        "outputs": (d,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    a, b = data["args"][0].double(), data["args"][1].double()
    dots = torch.addmm(b.square().sum(-1).expand(len(a), -1), a, b.T, alpha=-2)
    return (dots.add_(a.square().sum(-1)[:, None]),)


CASES = [
    Case(
        name=f"vis_cdist2/{m}x{n}x{k}",
        kernel=vis_cdist2,
        key=("M", "N", "K"),
        space=SPACE,
        make=partial(_make, (m, n, k), (40, 50, 37)),
        reference=_reference,
        tolerance=(2e-2, 1e-2),
        flops=2.0 * m * n * k,
        bytes=4.0 * (m * k + n * k + m * n),
    )
    for m, n, k in [
        (4096, 4096, 64),
        (8192, 8192, 128),
        (16384, 1024, 64),
        (1024, 65536, 32),
        (2048, 2048, 512),
        (65536, 256, 128),
        (512, 512, 16),
        (1024, 1024, 2048),
        (10000, 4000, 96),
    ]
]
