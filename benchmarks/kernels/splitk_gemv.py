"""Matrix-vector product of one decode step, K split over programs that add atomically."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal

FAMILY, HAND = "gemv", "serving"


@triton.jit
def splitk_gemv(
    x_ptr,
    w_ptr,
    y_ptr,
    N,
    K,
    stride_wn,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    pid_n = tl.program_id(0)
    pid_k = tl.program_id(1)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for k in range(pid_k * BLOCK_K, K, BLOCK_K * SPLIT_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + offs_k, mask=offs_k < K, other=0.0, eviction_policy="evict_last").to(tl.float32)
        w = tl.load(
            w_ptr + offs_n[:, None] * stride_wn + offs_k[None, :],
            mask=(offs_n[:, None] < N) & (offs_k[None, :] < K),
            other=0.0,
            eviction_policy="evict_first",
        ).to(tl.float32)
        acc += w * x[None, :]
    tl.atomic_add(y_ptr + offs_n, tl.sum(acc, axis=1), mask=offs_n < N, sem="relaxed")


SPACE: Space = {
    "kwargs": {"BLOCK_N": [4, 16, 32, 64], "BLOCK_K": [128, 256, 512], "SPLIT_K": [1, 4, 8, 16]},
    "num_warps": [4, 8],
    "num_stages": [3],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    n, k = tiny if small else shape
    x = normal((k,), device, seed=1)
    w = normal((n, k), device, seed=2, scale=k**-0.5)
    y = torch.zeros(n, dtype=torch.float32, device=device)
    return {
        "args": (x, w, y, n, k, w.stride(0)),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(n, meta["BLOCK_N"]), meta["SPLIT_K"]),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, w = data["args"][:2]
    return (w.float() @ x.float(),)


CASES = [
    Case(
        name=f"splitk_gemv/{n}x{k}",
        kernel=splitk_gemv,
        key=("N", "K"),
        space=SPACE,
        make=partial(_make, (n, k), tiny),
        reference=_reference,
        tolerance=(1e-3, 1e-3),
        reset_to_zero=("y_ptr",),
        flops=2.0 * n * k,
        bytes=2.0 * (n * k + k) + 4.0 * n,
    )
    for (n, k), tiny in [((14336, 4096), (70, 900)), ((4096, 14336), (16, 1024)), ((1024, 8192), (33, 50))]
]
