"""A loss of liger-kernel, forward and backward, as its own module launches it."""

import torch
from liger_kernel.transformers import LigerCrossEntropyLoss


def main() -> None:
    torch.manual_seed(0)
    loss = LigerCrossEntropyLoss()
    base = torch.randn(8192, 32000, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(0, 32000, (8192,), device="cuda")
    for _ in range(1500):
        logits = base.clone().requires_grad_()
        loss(logits, target).backward()
    torch.cuda.synchronize()


main()
