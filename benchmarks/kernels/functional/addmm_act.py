"""Matrix product with scaled bias and a switchable activation, all in the epilogue's helper functions."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.functional.helpers import activate, inside, swizzled, tile_range

FAMILY, HAND = "gemm", "functional"


@triton.jit
def epilogue(acc, bias, alpha, beta, ACTIVATION: tl.constexpr):
    return activate(alpha * acc + beta * bias[None, :].to(tl.float32), ACTIVATION)


@triton.jit
def fn_addmm_act(
    a_ptr,
    b_ptr,
    bias_ptr,
    c_ptr,
    alpha,
    beta,
    M,
    N,
    K,
    stride_am,
    stride_bk,
    stride_cm,
    ACTIVATION: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    pid_m, pid_n = swizzled(tl.program_id(0), M, N, TILE_M, TILE_N, GROUP)
    rows = tile_range(pid_m, TILE_M)
    cols = tile_range(pid_n, TILE_N)
    depth = tl.arange(0, TILE_K)
    a_ptrs = a_ptr + rows[:, None] * stride_am + depth[None, :]
    b_ptrs = b_ptr + depth[:, None] * stride_bk + cols[None, :]
    acc = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
    for start in range(0, K, TILE_K):
        a = tl.load(a_ptrs, mask=inside(rows, start + depth, M, K), other=0.0)
        b = tl.load(b_ptrs, mask=inside(start + depth, cols, K, N), other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += TILE_K
        b_ptrs += TILE_K * stride_bk
    bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0)
    c = epilogue(acc, bias, alpha, beta, ACTIVATION)
    c_ptrs = c_ptr + rows[:, None] * stride_cm + cols[None, :]
    tl.store(c_ptrs, c.to(c_ptr.dtype.element_ty), mask=inside(rows, cols, M, N))


SPACE: Space = {
    "kwargs": {
        "TILE_M": [32, 64, 128, 256],
        "TILE_N": [64, 128, 256],
        "TILE_K": [32, 64],
        "GROUP": [1, 8],
    },
    "num_warps": [4, 8],
    "num_stages": [3, 4],
    "where": lambda p: (
        (
            p["TILE_M"] * p["TILE_N"] <= 32768
            and (p["num_warps"] == 8) == (p["TILE_M"] * p["TILE_N"] > 8192)
            and (p["TILE_K"] == 32) == (p["num_stages"] == 4)
        )
        or (p["TILE_M"] == p["TILE_N"] and p["TILE_K"] == 64 and p["GROUP"] == 8 and p["TILE_M"] < 256)
    ),
}

Shape = tuple[int, int, int]


def _make(shape: Shape, tiny: Shape, activation: str, device: str, small: bool = False) -> Data:
    m, n, k = tiny if small else shape
    dtype = torch.float16 if small else torch.bfloat16  # the interpreter has no dot product of bf16
    a = normal((m, k), device, dtype=dtype, seed=1)
    b = normal((k, n), device, dtype=dtype, seed=2, scale=k**-0.5)
    bias = normal((n,), device, dtype=dtype, seed=3)
    c = unset((m, n), device, dtype=dtype)
    return {
        "args": (a, b, bias, c, 0.75, 0.5, m, n, k, k, n, n),
        "kwargs": {"ACTIVATION": activation},
        "grid": lambda meta: (triton.cdiv(m, meta["TILE_M"]) * triton.cdiv(n, meta["TILE_N"]),),
        "outputs": (c,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    a, b, bias, _, alpha, beta = data["args"][:6]
    c = alpha * (a.float() @ b.float()) + beta * bias.float()
    functions = {"gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}
    return (functions[data["kwargs"]["ACTIVATION"]](c),)


CASES = [
    Case(
        name=f"fn_addmm_act/{m}x{n}x{k}_{activation}",
        kernel=fn_addmm_act,
        key=("M", "N", "K"),
        space=SPACE,
        make=partial(_make, (m, n, k), (70, 90, 80), activation),
        reference=_reference,
        tolerance=(2e-2, 1e-2),
        flops=2.0 * m * n * k,
        bytes=2.0 * (m * k + k * n + n + m * n),
    )
    for m, n, k, activation in [
        (4096, 4096, 1024, "gelu"),
        (2048, 5120, 1280, "gelu"),
        (8192, 3072, 768, "gelu"),
        (256, 16384, 4096, "gelu"),
        (32, 11008, 4096, "gelu"),
        (1024, 1024, 8192, "gelu"),
        (512, 512, 512, "gelu"),
        (4096, 14336, 4096, "silu"),
        (16, 4096, 14336, "silu"),
        (16384, 320, 320, "silu"),
    ]
]
