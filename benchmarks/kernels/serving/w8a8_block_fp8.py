"""fp8 times fp8 with a scale for each 1x128 stretch of activations and each 128x128 block of weights."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.serving._work import moved

FAMILY, HAND = "gemm", "serving"


@triton.jit
def srv_w8a8_block_fp8(
    A,
    B,
    C,
    As,
    Bs,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    stride_As_m,
    stride_As_k,
    stride_Bs_k,
    stride_Bs_n,
    group_n: tl.constexpr,
    group_k: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    pid = tl.program_id(axis=0)
    num_pid_m = tl.cdiv(M, BLOCK_SIZE_M)
    num_pid_n = tl.cdiv(N, BLOCK_SIZE_N)
    num_pid_in_group = GROUP_SIZE_M * num_pid_n
    group_id = pid // num_pid_in_group
    first_pid_m = group_id * GROUP_SIZE_M
    group_size_m = min(num_pid_m - first_pid_m, GROUP_SIZE_M)
    pid_m = first_pid_m + (pid % group_size_m)
    pid_n = (pid % num_pid_in_group) // group_size_m
    offs_am = (pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)) % M
    offs_bn = (pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    offs_k = tl.arange(0, BLOCK_SIZE_K)
    a_ptrs = A + (offs_am[:, None] * stride_am + offs_k[None, :] * stride_ak)
    b_ptrs = B + (offs_k[:, None] * stride_bk + offs_bn[None, :] * stride_bn)
    As_ptrs = As + offs_am * stride_As_m
    Bs_ptrs = Bs + (offs_bn // group_n) * stride_Bs_n
    accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_SIZE_K)):
        k_mask = offs_k < K - k * BLOCK_SIZE_K
        a = tl.load(a_ptrs, mask=k_mask[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=k_mask[:, None], other=0.0)
        offs_ks = k * BLOCK_SIZE_K // group_k
        a_s = tl.load(As_ptrs + offs_ks * stride_As_k)
        b_s = tl.load(Bs_ptrs + offs_ks * stride_Bs_k)
        accumulator += tl.dot(a, b) * a_s[:, None] * b_s[None, :]
        a_ptrs += BLOCK_SIZE_K * stride_ak
        b_ptrs += BLOCK_SIZE_K * stride_bk
    offs_cm = pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    offs_cn = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    c_ptrs = C + stride_cm * offs_cm[:, None] + stride_cn * offs_cn[None, :]
    c_mask = (offs_cm[:, None] < M) & (offs_cn[None, :] < N)
    tl.store(c_ptrs, accumulator.to(C.dtype.element_ty), mask=c_mask)


SPACE: Space = {
    "kwargs": {
        "BLOCK_SIZE_M": [32, 64, 128],
        "BLOCK_SIZE_N": [32, 64, 128],
        "BLOCK_SIZE_K": [64, 128],
        "GROUP_SIZE_M": [16],
    },
    "num_warps": [4, 8],
    "num_stages": [2, 4],
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    m, n, k = tiny if small else shape
    a = normal((m, k), device, dtype=torch.float8_e4m3fn, seed=1, scale=8.0)
    b = normal((n, k), device, dtype=torch.float8_e4m3fn, seed=2, scale=8.0)
    a_s = (normal((m, triton.cdiv(k, 128)), device, dtype=torch.float32, seed=3).abs() + 0.2) / 8
    b_s = normal((triton.cdiv(n, 128), triton.cdiv(k, 128)), device, dtype=torch.float32, seed=4).abs() + 0.2
    b_s = b_s / 8 * k**-0.5
    c = unset((m, n), device, dtype=torch.bfloat16)
    strides = (
        *a.stride(),
        b.stride(1),
        b.stride(0),
        *c.stride(),
        *a_s.stride(),
        b_s.stride(1),
        b_s.stride(0),
    )
    return {
        "args": (a, b, c, a_s, b_s, m, n, k, *strides),
        "kwargs": {"group_n": 128, "group_k": 128},
        "grid": lambda meta: (triton.cdiv(m, meta["BLOCK_SIZE_M"]) * triton.cdiv(n, meta["BLOCK_SIZE_N"]),),
        "outputs": (c,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    a, b, _, a_s, b_s, _, n, k = data["args"][:8]
    left = a.float() * a_s.repeat_interleave(128, 1)[:, :k]
    right = b.float() * b_s.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return (left @ right.T,)


CASES = [
    Case(
        name=f"srv_w8a8_block_fp8/{m}x{n}x{k}",
        kernel=srv_w8a8_block_fp8,
        key=("M", "N", "K"),
        space=SPACE,
        make=partial(_make, (m, n, k), (37, 150, 200)),
        reference=_reference,
        tolerance=(5e-2, 3e-2),
        flops=2.0 * m * n * k,
        bytes=moved(partial(_make, (m, n, k), (m, n, k))),
    )
    # No full K has a multiple of 16 scales, or there would be two versions of each config.
    for m, n, k in [
        (16, 7168, 4608),
        (64, 24576, 1536),
        (64, 7168, 2304),
        (128, 2112, 7168),
        (512, 4096, 7168),
        (1024, 24576, 1536),
        (4096, 7168, 2304),
        (4096, 4096, 7168),
        (16, 4608, 7168),
    ]
]
