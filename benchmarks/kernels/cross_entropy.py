"""Cross entropy, forward, over a large vocabulary: online logsumexp, one token a program."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, integers, normal, unset

FAMILY, HAND = "loss", "rows"


@triton.jit
def cross_entropy_fwd(
    X_ptr,
    X_stride,
    Y_ptr,
    loss_ptr,
    lse_ptr,
    n_cols,
    ignore_index,
    BLOCK_SIZE: tl.constexpr,
):
    # Tokens x vocabulary can exceed 2**31 elements.
    program_id = tl.program_id(0).to(tl.int64)
    X_ptr += program_id * X_stride
    y = tl.load(Y_ptr + program_id)
    m = float("-inf")
    d = 0.0
    for i in range(0, n_cols, BLOCK_SIZE):
        offsets = i + tl.arange(0, BLOCK_SIZE)
        x = tl.load(X_ptr + offsets, mask=offsets < n_cols, other=float("-inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(x))
        d = d * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new))
        m = m_new
    lse = m + tl.log(d)
    tl.store(lse_ptr + program_id, lse)
    if y == ignore_index:
        tl.store(loss_ptr + program_id, 0.0)
        return
    x_y = tl.load(X_ptr + y).to(tl.float32)
    tl.store(loss_ptr + program_id, lse - x_y)


SPACE: Space = {
    "kwargs": {"BLOCK_SIZE": [256, 1024, 2048, 4096, 8192, 16384, 32768]},
    "num_warps": [4, 8, 16, 32],
    "num_stages": [1, 2, 4],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    tokens, vocab = tiny if small else shape
    logits = normal((tokens, vocab), device, seed=1, scale=2.0)
    target = integers(0, vocab, (tokens,), device, dtype=torch.int64, seed=2)
    # The first token is padding, as in any batch of sequences of different lengths.
    target[:1] = -100
    loss, lse = unset((tokens,), device, dtype=torch.float32), unset((tokens,), device, dtype=torch.float32)
    return {
        "args": (logits, logits.stride(0), target, loss, lse, vocab, -100),
        "kwargs": {},
        "grid": lambda _: (tokens,),
        "outputs": (loss, lse),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    logits, _, target, *_, ignored = data["args"]
    lse = logits.float().logsumexp(-1)
    picked = logits.gather(1, target.clamp(min=0)[:, None])[:, 0].float()
    return torch.where(target == ignored, 0.0, lse - picked), lse


CASES = [
    Case(
        name=f"cross_entropy/{tokens}x{vocab}",
        kernel=cross_entropy_fwd,
        key=("n_cols",),
        space=SPACE,
        make=partial(_make, (tokens, vocab), tiny),
        reference=_reference,
        tolerance=(1e-3, 1e-3),
        # Compare, subtract, exponentiate, add.
        flops=4.0 * tokens * vocab,
        bytes=2.0 * tokens * vocab + 8.0 * tokens + 4.0 * 2 * tokens,
    )
    for (tokens, vocab), tiny in [
        ((4096, 128256), (3, 3000)),
        ((8192, 50257), (4, 1024)),
        ((512, 32000), (2, 100)),
    ]
]
