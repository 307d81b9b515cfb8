"""Batched product of attention scores and values in fp32, from a template, on TF32 tensor cores."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "gemm", "inductor"


@triton.jit
def tem_fused_bmm(
    arg_A,
    arg_B,
    out_ptr0,
    ks0,
    ks1,
    ks2,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FLOAT32_PRECISION: tl.constexpr,
):
    M = ks0
    N = ks1
    K = ks2
    pid = tl.program_id(0)
    grid_m = (M + BLOCK_M - 1) // BLOCK_M
    grid_n = (N + BLOCK_N - 1) // BLOCK_N
    width = GROUP_M * grid_n
    group_id = pid // width
    group_size = tl.minimum(grid_m - group_id * GROUP_M, GROUP_M)
    pid_m = group_id * GROUP_M + (pid % group_size)
    pid_n = (pid % width) // group_size
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    idx_q = tl.program_id(1)
    A = arg_A + (rm[:, None] % M * K + rk[None, :] + idx_q * M * K)
    B = arg_B + (rk[:, None] * N + rn[None, :] % N + idx_q * K * N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(K, 0, -BLOCK_K):
        a = tl.load(A, mask=rk[None, :] < k, other=0.0)
        b = tl.load(B, mask=rk[:, None] < k, other=0.0)
        acc += tl.dot(a, b, input_precision=FLOAT32_PRECISION)
        A += BLOCK_K
        B += BLOCK_K * N
    idx_m = rm[:, None]
    idx_n = rn[None, :]
    mask = (idx_m < M) & (idx_n < N)
    xindex = idx_n + N * idx_m + M * N * idx_q
    tl.store(out_ptr0 + tl.broadcast_to(xindex, acc.shape), acc, mask)


SPACE: Space = {
    "kwargs": {
        "GROUP_M": [8],
        "BLOCK_M": [32, 64, 128],
        "BLOCK_N": [32, 64, 128],
        "BLOCK_K": [16, 32, 64],
    },
    "num_warps": [4, 8],
    "num_stages": [2, 4],
    "where": lambda c: c["num_warps"] * 1024 <= c["BLOCK_M"] * c["BLOCK_N"] <= c["num_warps"] * 4096,
}


def _make(
    shape: tuple[int, int, int, int], tiny: tuple[int, int, int, int], device: str, small: bool = False
) -> Data:
    batch, m, n, k = tiny if small else shape
    a = normal((batch, m, k), device, dtype=torch.float32, seed=1)
    b = normal((batch, k, n), device, dtype=torch.float32, seed=2, scale=k**-0.5)
    y = unset((batch, m, n), device, dtype=torch.float32)
    return {
        "args": (a, b, y, m, n, k),
        "kwargs": {"FLOAT32_PRECISION": "tf32"},
        "grid": lambda meta: (
            triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),
            batch,
        ),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    a, b = data["args"][:2]
    return (torch.bmm(a, b),)


CASES = [
    Case(
        name=f"tem_fused_bmm/{q}x{m}x{n}x{k}",
        kernel=tem_fused_bmm,
        key=("ks0", "ks1", "ks2"),
        space=SPACE,
        make=partial(_make, (q, m, n, k), (2, 37, 50, 70)),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        flops=2.0 * q * m * n * k,
        bytes=4.0 * q * (m * k + k * n + m * n),
    )
    for q, m, n, k in [
        (32, 1024, 64, 1024),
        (128, 512, 64, 512),
        (768, 208, 64, 208),
        (16, 1024, 1024, 128),
        (8, 2048, 2048, 512),
        (64, 16, 128, 4096),
        (256, 256, 256, 64),
        (4, 256, 256, 256),
        (2, 4096, 1024, 1024),
    ]
]
