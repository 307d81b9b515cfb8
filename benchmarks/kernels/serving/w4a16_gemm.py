"""fp16 activations times int4 weights, eight to an int32 along K, with group scales and packed zeros."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, integers, normal
from benchmarks.kernels.serving._work import moved

FAMILY, HAND = "gemm", "serving"


@triton.jit
def srv_w4a16_gemm(
    a_ptr,
    qweight_ptr,
    scales_ptr,
    qzeros_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_qk,
    stride_qn,
    stride_sg,
    stride_sn,
    stride_zg,
    stride_zn,
    stride_cm,
    stride_cn,
    group_size: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    pid = tl.program_id(0)
    pid_z = tl.program_id(1)
    num_pid_n = tl.cdiv(N, BLOCK_SIZE_N)
    pid_m = pid // num_pid_n
    pid_n = pid % num_pid_n
    offs_m = pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    offs_n = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    offs_k = pid_z * BLOCK_SIZE_K + tl.arange(0, BLOCK_SIZE_K)
    mask_m = offs_m < M
    mask_n = offs_n < N
    # A word is read by the eight rows that unpack from it; the shifts do not change along K.
    shifter = (offs_k % 8) * 4
    zero_shifter = (offs_n % 8) * 4
    a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    q_ptrs = qweight_ptr + (offs_k[:, None] // 8) * stride_qk + offs_n[None, :] * stride_qn
    acc = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for k in range(pid_z * BLOCK_SIZE_K, K, BLOCK_SIZE_K * SPLIT_K):
        a = tl.load(a_ptrs, mask=mask_m[:, None], other=0.0)
        q = tl.load(q_ptrs, mask=mask_n[None, :], other=0)
        g = k // group_size
        s = tl.load(scales_ptr + g * stride_sg + offs_n * stride_sn, mask=mask_n, other=0.0)
        z = tl.load(qzeros_ptr + g * stride_zg + (offs_n // 8) * stride_zn, mask=mask_n, other=0)
        z = (z >> zero_shifter) & 0xF
        b = ((q >> shifter[:, None]) & 0xF) - z[None, :]
        acc += tl.dot(a, b.to(a.dtype) * s[None, :])
        a_ptrs += BLOCK_SIZE_K * SPLIT_K * stride_ak
        q_ptrs += (BLOCK_SIZE_K * SPLIT_K // 8) * stride_qk
    c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :] * stride_cn
    c_mask = mask_m[:, None] & mask_n[None, :]
    if SPLIT_K == 1:
        tl.store(c_ptrs, acc, mask=c_mask)
    else:
        tl.atomic_add(c_ptrs, acc, mask=c_mask, sem="relaxed")


SPACE: Space = {
    "kwargs": {
        "BLOCK_SIZE_M": [16, 32, 64],
        "BLOCK_SIZE_N": [64, 128],
        "BLOCK_SIZE_K": [32, 64, 128],
        "SPLIT_K": [1, 4],
    },
    "num_warps": [4, 8],
    "num_stages": [3],
}

GROUP = 128


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    m, n, k = tiny if small else shape
    a = normal((m, k), device, seed=1)
    q = integers(-(2**31), 2**31, (k // 8, n), device, dtype=torch.int64, seed=2).int()
    scales = ((normal((k // GROUP, n), device, seed=3).abs() + 0.1) / 6 * k**-0.5).half()
    zeros = integers(-(2**31), 2**31, (k // GROUP, n // 8), device, dtype=torch.int64, seed=4).int()
    c = torch.zeros(m, n, dtype=torch.float32, device=device)
    strides = [s for t in (a, q, scales, zeros, c) for s in t.stride()]
    return {
        "args": (a, q, scales, zeros, c, m, n, k, *strides),
        "kwargs": {"group_size": GROUP},
        "grid": lambda meta: (
            triton.cdiv(m, meta["BLOCK_SIZE_M"]) * triton.cdiv(n, meta["BLOCK_SIZE_N"]),
            meta["SPLIT_K"],
        ),
        "outputs": (c,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    a, q, scales, zeros = data["args"][:4]
    shifts = torch.arange(0, 32, 4, device=a.device, dtype=torch.int32)
    weights = ((q[:, None, :] >> shifts[None, :, None]) & 15).reshape(-1, q.shape[1])
    offsets = ((zeros[:, :, None] >> shifts) & 15).reshape(zeros.shape[0], -1)
    b = (weights - offsets.repeat_interleave(GROUP, 0)).float() * scales.float().repeat_interleave(GROUP, 0)
    return (a.float() @ b,)


CASES = [
    Case(
        name=f"srv_w4a16_gemm/{m}x{n}x{k}",
        kernel=srv_w4a16_gemm,
        key=("M", "N", "K"),
        space=SPACE,
        make=partial(_make, (m, n, k), (19, 72, 256)),
        reference=_reference,
        tolerance=(2e-2, 1e-2),
        reset_to_zero=("c_ptr",),
        flops=2.0 * m * n * k,
        bytes=moved(partial(_make, (m, n, k), (m, n, k))),
    )
    for m, n, k in [
        (16, 4096, 4096),
        (16, 28672, 8192),
        (32, 6144, 4096),
        (64, 4096, 14336),
        (128, 5120, 5120),
        (16, 1024, 8192),
        (512, 4096, 4096),
        (1024, 11008, 4096),
        (16, 10240, 8192),
    ]
]
