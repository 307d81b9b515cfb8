"""Cross entropy with label smoothing: the loss and the gradient of the logits in one kernel."""

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
def rows_ce_grad(
    X_ptr,
    X_stride,
    dX_ptr,
    dX_stride,
    Y_ptr,
    loss_ptr,
    n_cols,
    ignore_index,
    label_smoothing,
    grad_scale,
    BLOCK_SIZE: tl.constexpr,
    REVERSE: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
):
    row_idx = tl.program_id(0).to(tl.int64)
    X_ptr += row_idx * X_stride
    dX_ptr += row_idx * dX_stride
    y = tl.load(Y_ptr + row_idx)

    if y == ignore_index:
        for i in range(0, n_cols, BLOCK_SIZE):
            offsets = i + tl.arange(0, BLOCK_SIZE)
            tl.store(dX_ptr + offsets, 0.0, mask=offsets < n_cols)
        tl.store(loss_ptr + row_idx, 0.0)
        return

    m = float("-inf")
    d = 0.0
    total = 0.0
    for i in range(0, n_cols, BLOCK_SIZE):
        offsets = i + tl.arange(0, BLOCK_SIZE)
        x = tl.load(X_ptr + offsets, mask=offsets < n_cols, other=float("-inf")).to(tl.float32)
        if HAS_SMOOTHING:
            total += tl.sum(tl.where(offsets < n_cols, x, 0.0))
        m_new = tl.maximum(m, tl.max(x))
        d = d * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new))
        m = m_new

    lse = m + tl.log(d)
    x_y = tl.load(X_ptr + y).to(tl.float32)
    loss = lse - x_y
    eps = 0.0
    if HAS_SMOOTHING:
        eps = label_smoothing / n_cols
        loss = (1 - label_smoothing) * loss + label_smoothing * lse - eps * total
    tl.store(loss_ptr + row_idx, loss * grad_scale)

    # The end of the row is what the caches still hold.
    last = (tl.cdiv(n_cols, BLOCK_SIZE) - 1) * BLOCK_SIZE
    for i in range(0, n_cols, BLOCK_SIZE):
        offsets = last - i + tl.arange(0, BLOCK_SIZE) if REVERSE else i + tl.arange(0, BLOCK_SIZE)
        x = tl.load(X_ptr + offsets, mask=offsets < n_cols, other=float("-inf")).to(tl.float32)
        grad = tl.exp(x - m) / d
        if HAS_SMOOTHING:
            grad -= eps
            grad = tl.where(offsets == y, grad - (1 - label_smoothing), grad)
        else:
            grad = tl.where(offsets == y, grad - 1.0, grad)
        tl.store(dX_ptr + offsets, grad * grad_scale, mask=offsets < n_cols)


SPACE: Space = {
    "kwargs": {"BLOCK_SIZE": [1024, 2048, 4096, 8192, 16384, 32768], "REVERSE": [False, True]},
    "num_warps": [4, 8, 16, 32],
    "num_stages": [1],
    "where": lambda c: c["BLOCK_SIZE"] <= 4096 * c["num_warps"],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    tokens, vocab = tiny if small else shape
    logits = normal((tokens, vocab), device, dtype=torch.bfloat16, seed=1, scale=2.0)
    target = integers(0, vocab, (tokens,), device, dtype=torch.int64, seed=2)
    target[:1] = -100
    grad = unset((tokens, vocab), device, dtype=torch.bfloat16)
    loss = unset((tokens,), device, dtype=torch.float32)
    return {
        "args": (logits, logits.stride(0), grad, grad.stride(0), target, loss, vocab, -100, 0.1, 0.5),
        "kwargs": {"HAS_SMOOTHING": True},
        "grid": lambda _: (tokens,),
        "outputs": (loss, grad),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    logits, _, _, _, target, _, vocab, ignored, smoothing, scale = data["args"]
    x = logits.float()
    lse = x.logsumexp(-1)
    index = target.clamp(min=0)[:, None]
    keep = target != ignored
    loss = lse - (1 - smoothing) * x.gather(1, index)[:, 0] - smoothing * x.mean(-1)
    x.sub_(lse[:, None]).exp_().sub_(smoothing / vocab)
    x.scatter_add_(1, index, torch.full_like(index, smoothing - 1.0, dtype=torch.float32))
    return loss * keep * scale, x.mul_(keep[:, None] * scale)


CASES = [
    Case(
        name=f"rows_ce_grad/{tokens}x{vocab}",
        kernel=rows_ce_grad,
        key=("n_cols",),
        space=SPACE,
        make=partial(_make, (tokens, vocab), tiny),
        reference=_reference,
        tolerance=(1e-3, 1e-2),
        flops=9.0 * tokens * vocab,
        bytes=4.0 * tokens * vocab + 12.0 * tokens,
    )
    for (tokens, vocab), tiny in [
        ((2048, 128256), (3, 3000)),
        ((512, 128256), (2, 1024)),
        ((4096, 32000), (3, 100)),
        ((256, 32000), (2, 100)),
        ((1024, 151936), (2, 2100)),
        ((2048, 50272), (2, 100)),
        ((16384, 4096), (2, 100)),
        ((8192, 16384), (2, 100)),
        ((32, 256000), (2, 100)),
    ]
]
