"""Multi-LoRA shrink: tokens, sorted by adapter, times the adapter's A, K split with atomic adds."""

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
def srv_lora_shrink(
    input_ptr,
    lora_ptr,
    out_ptr,
    M,
    N,
    K,
    token_indices_ptr,
    num_tokens_per_lora_ptr,
    lora_token_start_ptr,
    scaling,
    stride_xm,
    stride_xk,
    stride_la,
    stride_ln,
    stride_lk,
    stride_om,
    stride_on,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    cta_n_num = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    pid_k = pid % SPLIT_K
    pid_n = (pid // SPLIT_K) % cta_n_num
    pid_m = pid // SPLIT_K // cta_n_num
    lora_id = tl.program_id(1)
    lora_m = tl.load(num_tokens_per_lora_ptr + lora_id)
    if pid_m * BLOCK_M >= lora_m:
        return
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < lora_m
    start = tl.load(lora_token_start_ptr + lora_id)
    ram = tl.load(token_indices_ptr + start + rows, mask=row_mask, other=0)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = pid_k * BLOCK_K + tl.arange(0, BLOCK_K)
    a_ptrs = input_ptr + ram[:, None] * stride_xm + offs_k[None, :] * stride_xk
    b_ptrs = lora_ptr + lora_id * stride_la + (offs_n % N)[None, :] * stride_ln + offs_k[:, None] * stride_lk
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(pid_k * BLOCK_K, K, BLOCK_K * SPLIT_K):
        k_mask = k + tl.arange(0, BLOCK_K) < K
        a = tl.load(a_ptrs, mask=k_mask[None, :] & row_mask[:, None], other=0.0)
        b = tl.load(b_ptrs, mask=k_mask[:, None], other=0.0)
        accumulator += tl.dot(a, b)
        a_ptrs += BLOCK_K * SPLIT_K * stride_xk
        b_ptrs += BLOCK_K * SPLIT_K * stride_lk
    accumulator *= scaling
    c_ptrs = out_ptr + ram[:, None] * stride_om + offs_n[None, :] * stride_on
    c_mask = row_mask[:, None] & (offs_n < N)[None, :]
    if SPLIT_K == 1:
        tl.store(c_ptrs, accumulator, mask=c_mask)
    else:
        tl.atomic_add(c_ptrs, accumulator, mask=c_mask, sem="relaxed")


SPACE: Space = {
    "kwargs": {"BLOCK_M": [16, 32, 64], "BLOCK_N": [16, 32], "BLOCK_K": [64, 256], "SPLIT_K": [1, 8, 32]},
    "num_warps": [4],
    "num_stages": [2, 4],
}

Shape = tuple[int, int, int, int]


def _make(shape: Shape, tiny: Shape, device: str, small: bool = False) -> Data:
    tokens, loras, rank, hidden = tiny if small else shape
    x = normal((tokens, hidden), device, seed=1)
    lora_a = normal((loras, rank, hidden), device, seed=2, scale=hidden**-0.5)
    adapter = integers(0, loras, (tokens,), device, dtype=torch.int64, seed=3)
    order = torch.argsort(adapter, stable=True).int()
    counts = (adapter[:, None] == torch.arange(loras, device=device)).sum(0)
    starts = (counts.cumsum(0) - counts).int()
    out = torch.zeros(tokens, rank, dtype=torch.float32, device=device)
    strides = (*x.stride(), *lora_a.stride(), *out.stride())
    return {
        "args": (x, lora_a, out, tokens, rank, hidden, order, counts.int(), starts, 0.5, *strides),
        "kwargs": {},
        "grid": lambda meta: (
            meta["SPLIT_K"] * triton.cdiv(tokens, meta["BLOCK_M"]) * triton.cdiv(rank, meta["BLOCK_N"]),
            loras,
        ),
        "outputs": (out,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, lora_a, out, _, _, _, order, counts, starts, scaling = data["args"][:10]
    expected = torch.zeros_like(out)
    for lora, (count, start) in enumerate(zip(counts.tolist(), starts.tolist(), strict=True)):
        rows = order[start : start + count].long()
        expected[rows] = x[rows].float() @ lora_a[lora].float().T * scaling
    return (expected,)


CASES = [
    Case(
        name="srv_lora_shrink/" + "x".join(map(str, shape)),
        kernel=srv_lora_shrink,
        key=("M", "N", "K"),
        space=SPACE,
        make=partial(_make, shape, (9, 3, 24, 300)),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        reset_to_zero=("out_ptr",),
        flops=2.0 * shape[0] * shape[2] * shape[3],
        bytes=moved(partial(_make, shape, shape)),
    )
    for shape in [
        (16, 4, 16, 4096),
        (64, 16, 16, 4096),
        (256, 8, 64, 8192),
        (1024, 4, 32, 4096),
        (4096, 2, 16, 5120),
        (8192, 4, 64, 4096),
        (64, 32, 128, 14336),
        (16384, 8, 32, 2048),
        (512, 64, 16, 4096),
    ]
]
