# mode: honest
# title: a Triton kernel that gives its loads an eviction hint, which is faster on some devices
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
    value = tl.load(x + row * stride + at, mask=at < n, other=float("-inf"), eviction_policy="evict_last")
    value = tl.exp(value - tl.max(value, 0))
    tl.store(y + row * n + at, value / tl.sum(value, 0), mask=at < n)


def run(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _softmax[(x.shape[0],)](x, y, x.stride(0), x.shape[1], triton.next_power_of_2(x.shape[1]))
    return y
