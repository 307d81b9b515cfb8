"""fp16 matrix multiplication in the idiom of Triton's tutorial: raw pointers, grouped program order."""

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

FAMILY, HAND = "gemm", "tutorial"


@triton.jit
def matmul_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # Programs run through GROUP_M rows of tiles before moving on, so that B's tiles stay in L2.
    pid = tl.program_id(axis=0)
    num_pid_m = tl.cdiv(M, BLOCK_M)
    num_pid_n = tl.cdiv(N, BLOCK_N)
    num_pid_in_group = GROUP_M * num_pid_n
    group_id = pid // num_pid_in_group
    first_pid_m = group_id * GROUP_M
    group_size_m = min(num_pid_m - first_pid_m, GROUP_M)
    pid_m = first_pid_m + ((pid % num_pid_in_group) % group_size_m)
    pid_n = (pid % num_pid_in_group) // group_size_m

    offs_am = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    offs_bn = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + (offs_am[:, None] * stride_am + offs_k[None, :] * stride_ak)
    b_ptrs = b_ptr + (offs_k[:, None] * stride_bk + offs_bn[None, :] * stride_bn)

    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k * BLOCK_K, other=0.0)
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BLOCK_K, other=0.0)
        accumulator = tl.dot(a, b, accumulator)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    c = accumulator.to(tl.float16)

    offs_cm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_cn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    c_ptrs = c_ptr + stride_cm * offs_cm[:, None] + stride_cn * offs_cn[None, :]
    c_mask = (offs_cm[:, None] < M) & (offs_cn[None, :] < N)
    tl.store(c_ptrs, c, mask=c_mask)


SPACE: Space = {
    "kwargs": {"BLOCK_M": [64, 128, 256], "BLOCK_N": [64, 128, 256], "BLOCK_K": [32, 64], "GROUP_M": [8]},
    "num_warps": [4, 8],
    "num_stages": [3, 4],
}


def _sane(p: dict[str, int]) -> bool:
    """No tile so large that accumulators alone overflow the registers, none with idle warps."""
    per_thread = p["BLOCK_M"] * p["BLOCK_N"] / (32 * p["num_warps"])
    return 4 <= per_thread <= 256 and p["BLOCK_M"] * p["BLOCK_N"] >= 1024


WIDE: Space = {
    "kwargs": {
        "BLOCK_M": [16, 32, 64, 128, 256],
        "BLOCK_N": [16, 32, 64, 128, 256],
        "BLOCK_K": [16, 32, 64, 128],
        "GROUP_M": [1, 4, 8],
    },
    "num_warps": [2, 4, 8],
    "num_stages": [2, 3, 4, 5],
    "where": _sane,
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    m, n, k = tiny if small else shape
    a = normal((m, k), device, seed=1)
    b = normal((k, n), device, seed=2, scale=k**-0.5)
    c = unset((m, n), device)
    return {
        "args": (a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride()),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),),
        "outputs": (c,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    a, b = data["args"][:2]
    return (a.float() @ b.float(),)


CASES = [
    Case(
        name=f"matmul/{m}x{n}x{k}",
        kernel=matmul_kernel,
        key=("M", "N", "K"),
        space=SPACE,
        wide=WIDE,
        make=partial(_make, (m, n, k), tiny),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        flops=2.0 * m * n * k,
        bytes=2.0 * (m * k + k * n + m * n),
    )
    for (m, n, k), tiny in [
        ((4096, 4096, 4096), (70, 90, 72)),
        ((2048, 2048, 2048), (128, 64, 64)),
        ((512, 11008, 4096), (5, 300, 100)),
    ]
]
