"""A user's script with two Triton kernels of its own: a layer norm, and the backward of a gated activation."""

import torch
import triton
import triton.language as tl


@triton.autotune([triton.Config({"BLOCK": b}, num_warps=w) for b, w in ((1024, 4), (2048, 8))], key=["n"])
@triton.jit
def layer_norm_kernel(x, y, weight, bias, mean, rstd, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x += row * n
    y += row * n
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
    center = tl.sum(total, axis=0) / n
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
        value = tl.where(i < n, value - center, 0.0)
        squares += value * value
    scale = 1 / tl.sqrt(tl.sum(squares, axis=0) / n + eps)
    tl.store(mean + row, center)
    tl.store(rstd + row, scale)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
        w = tl.load(weight + i, mask=i < n).to(tl.float32)
        b = tl.load(bias + i, mask=i < n).to(tl.float32)
        tl.store(y + i, (value - center) * scale * w + b, mask=i < n)


@triton.jit
def swiglu_backward_kernel(grad, gates, grad_gates, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    g = tl.load(grad + row * n + i, mask=i < n, other=0.0).to(tl.float32)
    a = tl.load(gates + row * 2 * n + i, mask=i < n, other=0.0).to(tl.float32)
    b = tl.load(gates + row * 2 * n + n + i, mask=i < n, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    tl.store(grad_gates + row * 2 * n + i, g * b * (s + a * s * (1 - s)), mask=i < n)
    tl.store(grad_gates + row * 2 * n + n + i, g * a * s, mask=i < n)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    rows, n = x.shape
    y = torch.empty_like(x)
    mean, rstd = (torch.empty(rows, device=x.device, dtype=torch.float32) for _ in range(2))
    layer_norm_kernel[(rows,)](x, y, weight, bias, mean, rstd, n, 1e-5)
    return y


def swiglu_backward(grad: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    rows, n = grad.shape
    grad_gates = torch.empty_like(gates)
    block = triton.next_power_of_2(n)
    swiglu_backward_kernel[(rows,)](grad, gates, grad_gates, n, BLOCK=block, num_warps=8)
    return grad_gates


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16)
    weight, bias = (torch.randn(4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    gates = torch.randn(8192, 2 * 5632, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(8192, 5632, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        layer_norm(x, weight, bias)
        swiglu_backward(grad, gates)

    for _ in range(1500):
        step()
    torch.cuda.synchronize()


main()
