"""A model under torch.compile, trained: gated recurrences by Triton kernels of its own, all else by Inductor."""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn


@triton.jit
def recurrence_kernel(decay, x, h, length, width, BLOCK: tl.constexpr):
    at = tl.program_id(1).to(tl.int64) * length * width + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) < width
    state = tl.zeros([BLOCK], dtype=tl.float32)
    for _ in range(length):
        a = tl.load(decay + at, mask=mask, other=0.0).to(tl.float32)
        state = a * state + tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(h + at, state, mask=mask)
        at += width


@triton.jit
def recurrence_backward_kernel(decay, h, grad, grad_decay, grad_x, length, width, BLOCK: tl.constexpr):
    at = tl.program_id(1).to(tl.int64) * length * width + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at += (length - 1) * width
    mask = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) < width
    state = tl.zeros([BLOCK], dtype=tl.float32)
    for t in range(length - 1, -1, -1):
        state += tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        before = tl.load(h + at - width, mask=mask & (t > 0), other=0.0).to(tl.float32)
        tl.store(grad_x + at, state, mask=mask)
        tl.store(grad_decay + at, state * before, mask=mask)
        state *= tl.load(decay + at, mask=mask, other=0.0).to(tl.float32)
        at -= width


@torch.library.custom_op("recurrences::scan", mutates_args=())
def scan(decay: Tensor, x: Tensor) -> Tensor:
    rows, length, width = x.shape
    h = torch.empty_like(x)
    recurrence_kernel[(triton.cdiv(width, 64), rows)](decay, x, h, length, width, BLOCK=64, num_warps=2)
    return h


@torch.library.custom_op("recurrences::scan_backward", mutates_args=())
def scan_backward(decay: Tensor, h: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    rows, length, width = h.shape
    grad_decay, grad_x = torch.empty_like(h), torch.empty_like(h)
    grid = (triton.cdiv(width, 64), rows)
    recurrence_backward_kernel[grid](decay, h, grad, grad_decay, grad_x, length, width, BLOCK=64, num_warps=2)
    return grad_decay, grad_x


@scan.register_fake
def _(decay: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


@scan_backward.register_fake
def _(decay: Tensor, h: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(h), torch.empty_like(h)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0], output)


def _backward(ctx, grad):
    decay, h = ctx.saved_tensors
    return scan_backward(decay, h, grad.contiguous())


scan.register_autograd(_backward, setup_context=_save)


class Block(nn.Module):
    """A gated recurrence and a feed-forward, each on a normalised residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.forward_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.gates, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        forget, value, gate = self.gates(self.norm(x)).chunk(3, dim=-1)
        decay = torch.sigmoid(forget)
        mixed = scan(decay.contiguous(), ((1 - decay) * value).contiguous())
        x = x + self.out(mixed * nn.functional.silu(gate))
        return x + self.down(nn.functional.gelu(self.up(self.forward_norm(x))))


def main() -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(*(Block(1024) for _ in range(2))).to(torch.bfloat16)
        x = torch.randn(8, 1024, 1024, dtype=torch.bfloat16)
    compiled = torch.compile(model)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        compiled(x).float().square().mean().backward()

    for _ in range(400):
        step()
    torch.cuda.synchronize()


main()
