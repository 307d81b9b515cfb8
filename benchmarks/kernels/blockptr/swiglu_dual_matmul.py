"""Gate and up projections of a SwiGLU block at once: two accumulators over one activation block."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.blockptr.tiles import SMS, load_block, store_block

FAMILY, HAND = "gemm", "blockptr"


@triton.jit
def bp_swiglu_dual_matmul(
    x_ptr,
    gate_ptr,
    up_ptr,
    y_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wk,
    stride_wn,
    stride_ym,
    stride_yn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS_FIRST: tl.constexpr,
    NUM_SMS: tl.constexpr,
):
    tl.assume(stride_xm > 0)
    tl.assume(stride_wk > 0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile_id in tl.range(tl.program_id(0), tiles_m * tiles_n, NUM_SMS):
        if COLUMNS_FIRST:
            off_m = (tile_id // tiles_n) * BLOCK_M
            off_n = (tile_id % tiles_n) * BLOCK_N
        else:
            off_m = (tile_id % tiles_m) * BLOCK_M
            off_n = (tile_id // tiles_m) * BLOCK_N
        gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for off_k in tl.range(0, K, BLOCK_K):
            x = load_block(x_ptr, M, K, stride_xm, stride_xk, off_m, off_k, BLOCK_M, BLOCK_K)
            g = load_block(gate_ptr, K, N, stride_wk, stride_wn, off_k, off_n, BLOCK_K, BLOCK_N)
            u = load_block(up_ptr, K, N, stride_wk, stride_wn, off_k, off_n, BLOCK_K, BLOCK_N)
            gate = tl.dot(x, g, gate)
            up = tl.dot(x, u, up)
        y = gate * tl.sigmoid(gate) * up
        store_block(y_ptr, y, M, N, stride_ym, stride_yn, off_m, off_n, BLOCK_M, BLOCK_N)


SPACE: Space = {
    "kwargs": {
        "BLOCK_M": [16, 64, 128],
        "BLOCK_N": [32, 64, 128],
        "BLOCK_K": [32, 64],
        "COLUMNS_FIRST": [False, True],
    },
    "num_warps": [4, 8],
    "num_stages": [3, 4],
    "where": lambda p: (p["num_warps"] == 8) == (p["BLOCK_M"] * p["BLOCK_N"] >= 8192),
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    m, n, k = tiny if small else shape
    x = normal((m, k), device, seed=1)
    gate, up = (normal((k, n), device, seed=seed, scale=k**-0.5) for seed in (2, 3))
    y = unset((m, n), device)
    return {
        "args": (x, gate, up, y, m, n, k, *x.stride(), *gate.stride(), *y.stride()),
        "kwargs": {"NUM_SMS": SMS},
        "grid": lambda meta: (min(SMS, triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"])),),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, gate, up = data["args"][:3]
    return (torch.nn.functional.silu(x.float() @ gate.float()) * (x.float() @ up.float()),)


CASES = [
    Case(
        name=f"bp_swiglu_dual_matmul/{m}x{n}x{k}",
        kernel=bp_swiglu_dual_matmul,
        key=("M", "N", "K"),
        space=SPACE,
        make=partial(_make, (m, n, k), (40, 90, 70)),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        # Sigmoid (3) and two products for each output.
        flops=4.0 * m * n * k + 5.0 * m * n,
        bytes=2.0 * (m * k + 2 * k * n + m * n),
    )
    for m, n, k in [
        (4096, 11008, 4096),
        (2048, 8192, 2048),
        (16, 14336, 4096),
        (128, 11008, 4096),
        (512, 4864, 896),
        (8192, 2816, 1024),
        (32, 2048, 2048),
        (1024, 5632, 2048),
    ]
]
