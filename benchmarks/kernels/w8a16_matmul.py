"""fp16 activations times int8 weights with one scale per output channel, dequantised on the fly."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, integers, normal, unset

FAMILY, HAND = "gemm", "serving"


@triton.heuristics({"EVEN_K": lambda args: args["K"] % args["BK"] == 0})
@triton.jit
def w8a16_matmul(
    x_ptr,
    w_ptr,
    scale_ptr,
    y_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    stride_ym,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    pid_n = tl.program_id(0)
    pid_m = tl.program_id(1)
    offs_m = pid_m * BM + tl.arange(0, BM)
    offs_n = pid_n * BN + tl.arange(0, BN)
    offs_k = tl.arange(0, BK)
    mask_m = offs_m < M
    mask_n = offs_n < N
    # Weights are stored [N, K]: a tile is read transposed, K is its contiguous dimension.
    x_ptrs = x_ptr + offs_m[:, None] * stride_xm + offs_k[None, :]
    w_ptrs = w_ptr + offs_n[None, :] * stride_wn + offs_k[:, None]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        if EVEN_K:
            x = tl.load(x_ptrs, mask=mask_m[:, None], other=0.0)
            w = tl.load(w_ptrs, mask=mask_n[None, :], other=0)
        else:
            x = tl.load(x_ptrs, mask=mask_m[:, None] & (offs_k[None, :] < K - k), other=0.0)
            w = tl.load(w_ptrs, mask=mask_n[None, :] & (offs_k[:, None] < K - k), other=0)
        acc += tl.dot(x, w.to(x.dtype))
        x_ptrs += BK
        w_ptrs += BK
    scale = tl.load(scale_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    y = (acc * scale[None, :]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offs_m[:, None] * stride_ym + offs_n[None, :], y, mask=mask_m[:, None] & mask_n[None, :])


SPACE: Space = {
    "kwargs": {"BM": [16, 32, 64, 128], "BN": [64, 128, 256], "BK": [64, 128]},
    "num_warps": [4, 8],
    "num_stages": [2, 4],
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    m, n, k = tiny if small else shape
    x = normal((m, k), device, seed=1)
    w = integers(-127, 128, (n, k), device, dtype=torch.int8, seed=2)
    # int8 weights have a standard deviation of 73, so this keeps the outputs near one.
    scale = normal((n,), device, dtype=torch.float32, seed=3)
    if device != "meta":  # there any arithmetic has torch import its compiler, for a second
        scale = (scale.abs() + 0.1) / 73 * k**-0.5
    y = unset((m, n), device)
    return {
        "args": (x, w, scale, y, m, n, k, x.stride(0), w.stride(0), y.stride(0)),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(n, meta["BN"]), triton.cdiv(m, meta["BM"])),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, w, scale = data["args"][:3]
    return (x.float() @ w.float().T * scale,)


CASES = [
    Case(
        name=f"w8a16_matmul/{m}x{n}x{k}",
        kernel=w8a16_matmul,
        key=("M", "N", "K"),
        space=SPACE,
        make=partial(_make, (m, n, k), tiny),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        flops=2.0 * m * n * k,
        bytes=2.0 * m * k + 1.0 * n * k + 4.0 * n + 2.0 * m * n,
    )
    for (m, n, k), tiny in [
        ((16, 14336, 4096), (3, 150, 200)),
        ((256, 4096, 4096), (70, 64, 128)),
        ((2048, 11008, 4096), (33, 300, 90)),
    ]
]
