import torch
import triton
import triton.language as tl


@triton.jit
def _cross_entropy(logits, target, loss, grad, stride, b, v, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < v
    x = tl.load(logits + row * stride + at, mask=mask, other=float("-inf")).to(tl.float32)
    chosen = tl.load(target + row)
    top = tl.max(x, 0)
    e = tl.exp(x - top)
    total = tl.sum(e, 0)
    picked = tl.sum(tl.where(at == chosen, x, 0.0), 0)
    tl.store(loss + row, tl.log(total) + top - picked)
    g = (e / total - tl.where(at == chosen, 1.0, 0.0)) / b
    tl.store(grad + row * v + at, g.to(tl.bfloat16), mask=mask)


def run(logits, target):
    b, v = logits.shape
    loss = torch.empty((b,), dtype=torch.float32, device=logits.device)
    grad = torch.empty((b, v), dtype=logits.dtype, device=logits.device)
    _cross_entropy[(b,)](logits, target, loss, grad, logits.stride(0), b, v, triton.next_power_of_2(v))
    return loss, grad
