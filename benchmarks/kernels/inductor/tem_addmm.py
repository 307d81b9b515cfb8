"""Linear layer and ReLU from a matrix multiplication template, epilogue pasted at the end."""

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

FAMILY, HAND = "gemm", "inductor"


@triton.heuristics({"EVEN_K": lambda args: args["ks2"] % args["BLOCK_K"] == 0})
@triton.jit
def tem_fused_addmm_relu(
    in_ptr0,
    in_ptr1,
    in_ptr2,
    out_ptr1,
    ks0,
    ks1,
    ks2,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    A = in_ptr1
    B = in_ptr2
    M = ks0
    N = ks1
    K = ks2
    pid = tl.program_id(0)
    grid_m = (M + BLOCK_M - 1) // BLOCK_M
    grid_n = (N + BLOCK_N - 1) // BLOCK_N
    # Programs that follow each other share columns of B, for the L2.
    width = GROUP_M * grid_n
    group_id = pid // width
    group_size = tl.minimum(grid_m - group_id * GROUP_M, GROUP_M)
    pid_m = group_id * GROUP_M + (pid % group_size)
    pid_n = (pid % width) // group_size
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ram = tl.max_contiguous(tl.multiple_of(rm % M, BLOCK_M), BLOCK_M)
    rbn = tl.max_contiguous(tl.multiple_of(rn % N, BLOCK_N), BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k_idx in range(0, tl.cdiv(K, BLOCK_K)):
        a_k_idx_vals = rk[None, :] + k_idx * BLOCK_K
        b_k_idx_vals = rk[:, None] + k_idx * BLOCK_K
        if EVEN_K:
            a = tl.load(A + (a_k_idx_vals + K * ram[:, None]))
            b = tl.load(B + (b_k_idx_vals + K * rbn[None, :]))
        else:
            a = tl.load(A + (a_k_idx_vals + K * ram[:, None]), a_k_idx_vals < K, other=0.0)
            b = tl.load(B + (b_k_idx_vals + K * rbn[None, :]), b_k_idx_vals < K, other=0.0)
        acc = tl.dot(a, b, acc)
    idx_m = rm[:, None]
    idx_n = rn[None, :]
    mask = (idx_m < M) & (idx_n < N)
    xindex = idx_n + N * idx_m
    tmp0 = tl.load(
        in_ptr0 + tl.broadcast_to(idx_n, acc.shape), mask, eviction_policy="evict_last", other=0.0
    ).to(tl.float32)
    tmp1 = acc + tmp0
    tmp2 = tl.full([1, 1], 0, tl.float32)
    tmp3 = tl.maximum(tmp2, tmp1)
    tl.store(out_ptr1 + tl.broadcast_to(xindex, acc.shape), tmp3, mask)


MM_CONFIGS = {  # BLOCK_M, BLOCK_N, BLOCK_K, num_stages, num_warps
    (16, 32, 128, 4, 2),
    (16, 64, 64, 5, 4),
    (16, 64, 128, 3, 4),
    (16, 128, 128, 3, 4),
    (32, 32, 128, 2, 4),
    (32, 64, 32, 5, 8),
    (32, 64, 128, 4, 4),
    (32, 128, 64, 4, 4),
    (64, 32, 32, 5, 8),
    (64, 64, 16, 2, 4),
    (64, 64, 32, 2, 4),
    (64, 64, 64, 3, 8),
    (64, 64, 128, 4, 4),
    (64, 64, 128, 5, 4),
    (64, 128, 32, 3, 4),
    (64, 128, 64, 4, 4),
    (64, 128, 128, 4, 4),
    (128, 32, 64, 3, 4),
    (128, 64, 32, 3, 4),
    (128, 64, 64, 4, 8),
    (128, 128, 32, 2, 8),
    (128, 128, 32, 3, 4),
    (128, 128, 64, 3, 4),
    (128, 128, 64, 3, 8),
    (128, 128, 64, 5, 8),
    (128, 128, 128, 3, 8),
    (128, 256, 64, 3, 8),
    (128, 256, 64, 4, 8),
    (256, 128, 32, 4, 8),
    (256, 128, 64, 3, 8),
}
NAMES = ["BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages", "num_warps"]

SPACE: Space = {
    "kwargs": {
        "GROUP_M": [1, 8],
        "BLOCK_M": [16, 32, 64, 128, 256],
        "BLOCK_N": [32, 64, 128, 256],
        "BLOCK_K": [16, 32, 64, 128],
    },
    "num_warps": [2, 4, 8],
    "num_stages": [2, 3, 4, 5],
    "where": lambda c: tuple(c[n] for n in NAMES) in MM_CONFIGS,
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    m, n, k = tiny if small else shape
    bias = normal((n,), device, seed=1)
    a = normal((m, k), device, seed=2)
    b = normal((n, k), device, seed=3, scale=k**-0.5)
    y = unset((m, n), device)
    return {
        "args": (bias, a, b, y, m, n, k),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    bias, a, b = (t.float() for t in data["args"][:3])
    return ((a @ b.T + bias).relu(),)


CASES = [
    Case(
        name=f"tem_fused_addmm_relu/{m}x{n}x{k}",
        kernel=tem_fused_addmm_relu,
        key=("ks0", "ks1", "ks2"),
        space=SPACE,
        make=partial(_make, (m, n, k), (37, 90, 70)),
        reference=_reference,
        tolerance=(2e-2, 2e-2),
        flops=2.0 * m * n * k,
        bytes=2.0 * (m * k + n * k + m * n + n),
    )
    for m, n, k in [
        (8192, 4096, 4096),
        (4096, 14336, 4096),
        (16384, 1024, 1024),
        (2048, 2048, 8192),
        (512, 4096, 11008),
        (16, 4096, 4096),
        (64, 11008, 4096),
        (50176, 384, 384),
        (256, 1024, 1024),
    ]
]
