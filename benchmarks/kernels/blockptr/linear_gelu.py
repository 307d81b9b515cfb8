"""Linear layer with weights stored [out, in]; bias and GELU in the epilogue."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.blockptr.tiles import grouped_tile, load_block, load_line, store_block

FAMILY, HAND = "gemm", "blockptr"


@triton.jit
def gelu(x):
    # The tanh form, as a sigmoid: 0.5 * (1 + tanh(u)) = sigmoid(2 * u).
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.heuristics({"EVEN_K": lambda args: args["K"] % args["BLOCK_K"] == 0})
@triton.jit
def bp_linear_gelu(
    x_ptr,
    w_ptr,
    bias_ptr,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    pid_m, pid_n = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    tl.assume(pid_m >= 0)
    tl.assume(pid_n >= 0)
    tl.assume(stride_xm > 0)
    tl.assume(stride_wn > 0)
    off_m = pid_m * BLOCK_M
    off_n = pid_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for off_k in tl.range(0, K, BLOCK_K):
        x = load_block(x_ptr, M, K, stride_xm, stride_xk, off_m, off_k, BLOCK_M, BLOCK_K, CHECK_1=not EVEN_K)
        w = load_block(w_ptr, K, N, stride_wk, stride_wn, off_k, off_n, BLOCK_K, BLOCK_N, CHECK_0=not EVEN_K)
        acc = tl.dot(x, w, acc)
    acc += load_line(bias_ptr, N, off_n, BLOCK_N).to(tl.float32)[None, :]
    store_block(y_ptr, gelu(acc), M, N, stride_ym, stride_yn, off_m, off_n, BLOCK_M, BLOCK_N)


SPACE: Space = {
    "kwargs": {
        "BLOCK_M": [32, 64, 128, 256],
        "BLOCK_N": [64, 128, 256],
        "BLOCK_K": [32, 64],
        "GROUP_M": [4],
    },
    "num_warps": [4, 8],
    "num_stages": [2, 3, 4],
    "where": lambda p: (
        p["BLOCK_M"] * p["BLOCK_N"] <= 32768
        and (p["num_warps"] == 8) == (p["BLOCK_M"] * p["BLOCK_N"] >= 16384)
    ),
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    m, n, k = tiny if small else shape
    # The interpreter multiplies bf16 blocks as if they were integers.
    dtype = torch.float16 if small else torch.bfloat16
    x = normal((m, k), device, dtype=dtype, seed=1)
    w = normal((n, k), device, dtype=dtype, seed=2, scale=k**-0.5)
    bias = normal((n,), device, dtype=dtype, seed=3)
    y = unset((m, n), device, dtype=dtype)
    return {
        "args": (x, w, bias, y, m, n, k, *x.stride(), *w.stride(), *y.stride()),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, w, bias = data["args"][:3]
    return (torch.nn.functional.gelu(x.float() @ w.float().T + bias.float(), approximate="tanh"),)


CASES = [
    Case(
        name=f"bp_linear_gelu/{m}x{n}x{k}",
        kernel=bp_linear_gelu,
        key=("M", "N", "K"),
        space=SPACE,
        make=partial(_make, (m, n, k), (100, 150, 90)),
        reference=_reference,
        tolerance=(2e-2, 2e-2),
        # Ten operations of bias and GELU for each output.
        flops=2.0 * m * n * k + 10.0 * m * n,
        bytes=2.0 * (m * k + n * k + n + m * n),
    )
    for m, n, k in [
        (16384, 3072, 768),
        (4096, 16384, 4096),
        (2048, 5120, 1280),
        (64, 8192, 2048),
        (1024, 4096, 1024),
        (50432, 1536, 384),
        (256, 12288, 3072),
        (8192, 320, 1280),
    ]
]
