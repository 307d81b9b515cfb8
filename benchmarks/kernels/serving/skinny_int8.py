"""A handful of int8 token rows times int8 weights, K split over programs that add scaled partials."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, integers, normal
from benchmarks.kernels.serving._work import moved

FAMILY, HAND = "gemv", "serving"


@triton.jit
def srv_skinny_int8(
    x_ptr,
    w_ptr,
    x_scale_ptr,
    w_scale_ptr,
    y_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_ym,
    stride_yn,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    pid_n = tl.program_id(0)
    pid_k = tl.program_id(1)
    offs_m = tl.arange(0, BLOCK_SIZE_M)
    offs_n = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    mask_m = offs_m < M
    mask_n = offs_n < N
    # Whole blocks for every split but the last.
    k_per_split = tl.cdiv(tl.cdiv(K, BLOCK_SIZE_K), SPLIT_K) * BLOCK_SIZE_K
    k_begin = pid_k * k_per_split
    k_end = min(k_begin + k_per_split, K)
    acc = tl.zeros((BLOCK_SIZE_N, BLOCK_SIZE_M), dtype=tl.int32)
    for k in range(k_begin, k_end, BLOCK_SIZE_K):
        offs_k = k + tl.arange(0, BLOCK_SIZE_K)
        mask_k = offs_k < k_end
        w = tl.load(
            w_ptr + offs_n[:, None] * stride_wn + offs_k[None, :] * stride_wk,
            mask=mask_n[:, None] & mask_k[None, :],
            other=0,
            eviction_policy="evict_first",
        )
        x = tl.load(
            x_ptr + offs_m[None, :] * stride_xm + offs_k[:, None] * stride_xk,
            mask=mask_m[None, :] & mask_k[:, None],
            other=0,
            eviction_policy="evict_last",
        )
        acc = tl.dot(w, x, acc, out_dtype=tl.int32)
    x_scale = tl.load(x_scale_ptr + offs_m, mask=mask_m, other=0.0)
    w_scale = tl.load(w_scale_ptr + offs_n, mask=mask_n, other=0.0)
    y = acc.to(tl.float32) * w_scale[:, None] * x_scale[None, :]
    y_ptrs = y_ptr + offs_m[None, :] * stride_ym + offs_n[:, None] * stride_yn
    tl.atomic_add(y_ptrs, y, mask=mask_m[None, :] & mask_n[:, None], sem="relaxed")


SPACE: Space = {
    "kwargs": {
        "BLOCK_SIZE_M": [16],
        "BLOCK_SIZE_N": [16, 32, 64, 128],
        "BLOCK_SIZE_K": [128, 256, 512],
        "SPLIT_K": [1, 4, 16],
    },
    "num_warps": [4],
    "num_stages": [2, 4],
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    m, n, k = tiny if small else shape
    x = integers(-127, 128, (m, k), device, dtype=torch.int8, seed=1)
    w = integers(-127, 128, (n, k), device, dtype=torch.int8, seed=2)
    x_scale = (normal((m,), device, dtype=torch.float32, seed=3).abs() + 0.1) / 73
    w_scale = (normal((n,), device, dtype=torch.float32, seed=4).abs() + 0.1) / 73 * k**-0.5
    y = torch.zeros(m, n, dtype=torch.float32, device=device)
    return {
        "args": (x, w, x_scale, w_scale, y, m, n, k, *x.stride(), *w.stride(), *y.stride()),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(n, meta["BLOCK_SIZE_N"]), meta["SPLIT_K"]),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, w, x_scale, w_scale = data["args"][:4]
    return (x.float() @ w.float().T * x_scale[:, None] * w_scale,)


CASES = [
    Case(
        name=f"srv_skinny_int8/{m}x{n}x{k}",
        kernel=srv_skinny_int8,
        key=("M", "N", "K"),
        space=SPACE,
        make=partial(_make, (m, n, k), (5, 70, 900)),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        reset_to_zero=("y_ptr",),
        flops=2.0 * m * n * k,
        bytes=moved(partial(_make, (m, n, k), (m, n, k))),
    )
    for m, n, k in [
        (8, 4096, 4096),
        (8, 28672, 8192),
        (8, 8192, 28672),
        (4, 1024, 8192),
        (8, 6144, 4096),
        (4, 128256, 4096),
        (8, 2048, 2048),
        (4, 4096, 14336),
        (12, 16384, 16384),
    ]
]
