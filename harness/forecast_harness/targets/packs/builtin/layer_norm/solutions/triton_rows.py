import torch
import triton
import triton.language as tl


@triton.jit
def _layer_norm(x, weight, bias, y, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < n
    value = tl.load(x + row * stride + at, mask=mask, other=0.0)
    value = tl.where(mask, value - tl.sum(value, 0) / n, 0.0)
    value = value / tl.sqrt(tl.sum(value * value, 0) / n + 1e-5)
    value = value * tl.load(weight + at, mask=mask) + tl.load(bias + at, mask=mask)
    tl.store(y + row * n + at, value, mask=mask)


def run(x, weight, bias):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _layer_norm[(x.shape[0],)](
        x, weight, bias, y, x.stride(0), x.shape[1], triton.next_power_of_2(x.shape[1])
    )
    return y
