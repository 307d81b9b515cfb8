# mode: honest
# title: a Triton kernel that passes over each row three times
# backend: cpu
# pack: softmax
# language: triton
# expected: accepted
import torch
import triton
import triton.language as tl


@triton.jit
def _softmax(x, y, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for start in range(0, n, BLOCK):
        top = tl.maximum(
            top, tl.load(x + row * stride + start + at, mask=start + at < n, other=float("-inf"))
        )
    highest = tl.max(top, 0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n, BLOCK):
        value = tl.load(x + row * stride + start + at, mask=start + at < n, other=float("-inf"))
        total += tl.exp(value - highest)
    scale = 1.0 / tl.sum(total, 0)
    for start in range(0, n, BLOCK):
        value = tl.load(x + row * stride + start + at, mask=start + at < n, other=float("-inf"))
        tl.store(y + row * n + start + at, tl.exp(value - highest) * scale, mask=start + at < n)


def run(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _softmax[(x.shape[0],)](x, y, x.stride(0), x.shape[1], 128)
    return y
