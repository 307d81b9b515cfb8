"""AdamW over flat parameters: fp32 master weights and moments, bf16 gradient and working copy."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "optimizer", "rows"


@triton.jit
def rows_adamw(
    p_ptr,
    g_ptr,
    m_ptr,
    v_ptr,
    p_out_ptr,
    m_out_ptr,
    v_out_ptr,
    half_out_ptr,
    numel,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    bias1,
    bias2,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS_PER_PROGRAM: tl.constexpr,
    STREAMING: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK_SIZE * BLOCKS_PER_PROGRAM
    policy: tl.constexpr = "evict_first" if STREAMING else ""
    for block in range(BLOCKS_PER_PROGRAM):
        offsets = start + block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        mask = offsets < numel
        p = tl.load(p_ptr + offsets, mask=mask, other=0.0, eviction_policy=policy)
        g = tl.load(g_ptr + offsets, mask=mask, other=0.0, eviction_policy=policy).to(tl.float32)
        m = tl.load(m_ptr + offsets, mask=mask, other=0.0, eviction_policy=policy)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0, eviction_policy=policy)
        p = p * (1 - lr * weight_decay)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        p -= lr * (m / bias1) / (tl.sqrt(v / bias2) + eps)
        tl.store(p_out_ptr + offsets, p, mask=mask)
        tl.store(m_out_ptr + offsets, m, mask=mask)
        tl.store(v_out_ptr + offsets, v, mask=mask)
        tl.store(half_out_ptr + offsets, p, mask=mask)


SPACE: Space = {
    "kwargs": {
        "BLOCK_SIZE": [128, 512, 1024, 4096, 8192],
        "BLOCKS_PER_PROGRAM": [1, 4, 16],
        "STREAMING": [False, True],
    },
    "num_warps": [4, 8],
    "num_stages": [1],
}


def _make(shape: int, tiny: int, device: str, small: bool = False) -> Data:
    count = tiny if small else shape
    p = normal((count,), device, dtype=torch.float32, seed=1)
    g = normal((count,), device, dtype=torch.bfloat16, seed=2)
    m = normal((count,), device, dtype=torch.float32, seed=3)
    v = normal((count,), device, dtype=torch.float32, seed=4).abs_() + 0.01
    outs = tuple(unset((count,), device, dtype=torch.float32) for _ in range(3))
    half = unset((count,), device, dtype=torch.bfloat16)
    return {
        "args": (p, g, m, v, *outs, half, count, 0.01, 0.9, 0.98, 1e-8, 0.1, 0.5, 0.1),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(count, meta["BLOCK_SIZE"] * meta["BLOCKS_PER_PROGRAM"]),),
        "outputs": (*outs, half),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    p, g, m, v = (t.float() for t in data["args"][:4])
    lr, beta1, beta2, eps, decay, bias1, bias2 = data["args"][9:]
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g.square()
    p = p * (1 - lr * decay) - lr * (m / bias1) / ((v / bias2).sqrt_() + eps)
    return p, m, v, p


CASES = [
    Case(
        name=f"rows_adamw/{count}",
        kernel=rows_adamw,
        key=("numel",),
        space=SPACE,
        make=partial(_make, count, tiny),
        reference=_reference,
        tolerance=(1e-3, 1e-2),
        flops=16.0 * count,
        bytes=28.0 * count,
    )
    for count, tiny in [
        (4096 * 4096, 9001),
        (14336 * 4096, 300),
        (1024 * 1024, 300),
        (768 * 3072, 300),
        (65536, 300),
        (262144, 300),
        (8192 * 4096, 300),
        (5120 * 1280, 300),
    ]
]
