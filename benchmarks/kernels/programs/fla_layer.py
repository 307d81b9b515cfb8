"""A layer of flash-linear-attention, forward and backward: HGRN, whose recurrence runs in chunks."""

import torch
from fla.layers import HGRNAttention


def main() -> None:
    torch.manual_seed(0)
    layer = HGRNAttention(hidden_size=1024).to("cuda", torch.bfloat16)
    x = torch.randn(8, 3072, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        layer(x)[0].backward(grad)

    for _ in range(400):
        step()
    torch.cuda.synchronize()


main()
