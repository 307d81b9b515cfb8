"""Multi-LoRA expand: low-rank rows times the adapter's B, added to what the base layer gave."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, integers, normal, unset
from benchmarks.kernels.serving._work import moved

FAMILY, HAND = "gemm", "serving"


@triton.heuristics({"EVEN_K": lambda args: args["K"] % args["BLOCK_K"] == 0})
@triton.jit
def srv_lora_expand(
    input_ptr,
    lora_ptr,
    base_ptr,
    out_ptr,
    M,
    N,
    K,
    token_indices_ptr,
    num_tokens_per_lora_ptr,
    lora_token_start_ptr,
    stride_xm,
    stride_xk,
    stride_lb,
    stride_ln,
    stride_lk,
    stride_om,
    stride_on,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    cta_m_num = tl.cdiv(M, BLOCK_M)
    pid = tl.program_id(0)
    pid_m = pid % cta_m_num
    pid_n = pid // cta_m_num
    lora_id = tl.program_id(1)
    lora_m = tl.load(num_tokens_per_lora_ptr + lora_id)
    if pid_m * BLOCK_M >= lora_m:
        return
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < lora_m
    start = tl.load(lora_token_start_ptr + lora_id)
    ram = tl.load(token_indices_ptr + start + rows, mask=row_mask, other=0)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rbn = offs_n % N
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = input_ptr + ram[:, None] * stride_xm + offs_k[None, :] * stride_xk
    b_ptrs = lora_ptr + lora_id * stride_lb + rbn[None, :] * stride_ln + offs_k[:, None] * stride_lk
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=(offs_k < K - k)[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=(offs_k < K - k)[:, None], other=0.0)
        accumulator += tl.dot(a.to(b.dtype), b)
        a_ptrs += BLOCK_K * stride_xk
        b_ptrs += BLOCK_K * stride_lk
    offs_c = ram[:, None] * stride_om + offs_n[None, :] * stride_on
    c_mask = row_mask[:, None] & (offs_n < N)[None, :]
    base = tl.load(base_ptr + offs_c, mask=c_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs_c, (accumulator + base).to(out_ptr.dtype.element_ty), mask=c_mask)


SPACE: Space = {
    "kwargs": {"BLOCK_M": [16, 32, 64, 128], "BLOCK_N": [64, 128, 256], "BLOCK_K": [16, 32]},
    "num_warps": [4, 8],
    "num_stages": [2],
}

Shape = tuple[int, int, int, int]


def _make(shape: Shape, tiny: Shape, device: str, small: bool = False) -> Data:
    tokens, loras, rank, hidden = tiny if small else shape
    x = normal((tokens, rank), device, dtype=torch.float32, seed=1)
    lora_b = normal((loras, hidden, rank), device, seed=2, scale=rank**-0.5)
    base = normal((tokens, hidden), device, seed=3)
    adapter = integers(0, loras, (tokens,), device, dtype=torch.int64, seed=4)
    order = torch.argsort(adapter, stable=True).int()
    counts = (adapter[:, None] == torch.arange(loras, device=device)).sum(0)
    starts = (counts.cumsum(0) - counts).int()
    out = unset((tokens, hidden), device)
    strides = (*x.stride(), *lora_b.stride(), *out.stride())
    return {
        "args": (x, lora_b, base, out, tokens, hidden, rank, order, counts.int(), starts, *strides),
        "kwargs": {},
        "grid": lambda meta: (
            triton.cdiv(tokens, meta["BLOCK_M"]) * triton.cdiv(hidden, meta["BLOCK_N"]),
            loras,
        ),
        "outputs": (out,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, lora_b, base, _, _, _, _, order, counts, starts = data["args"][:10]
    expected = base.float()
    for lora, (count, start) in enumerate(zip(counts.tolist(), starts.tolist(), strict=True)):
        rows = order[start : start + count].long()
        expected[rows] += x[rows].half().float() @ lora_b[lora].float().T
    return (expected,)


CASES = [
    Case(
        name="srv_lora_expand/" + "x".join(map(str, shape)),
        kernel=srv_lora_expand,
        key=("M", "N", "K"),
        space=SPACE,
        make=partial(_make, shape, (9, 3, 24, 150)),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        flops=2.0 * shape[0] * shape[2] * shape[3],
        bytes=moved(partial(_make, shape, shape)),
    )
    for shape in [
        (16, 4, 16, 4096),
        (64, 16, 16, 4096),
        (256, 8, 64, 28672),
        (1024, 4, 32, 4096),
        (4096, 2, 16, 5120),
        (8192, 4, 64, 8192),
        (64, 32, 128, 14336),
        (16384, 8, 32, 2048),
        (512, 64, 16, 4096),
    ]
]
