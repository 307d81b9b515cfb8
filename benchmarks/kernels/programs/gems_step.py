"""A step of a model on operations of flag_gems."""

import torch
from flag_gems.ops import layer_norm, layer_norm_backward, rms_norm, softmax_backward


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16)
    w, b = (torch.randn(4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    shares = torch.softmax(torch.randn(8192, 4096, device="cuda"), -1)
    g, gy = torch.randn_like(shares), torch.randn_like(x)
    for _ in range(300):
        _, mean, rstd = layer_norm(x, [4096], w, b)
        layer_norm_backward(gy, x, [4096], mean, rstd, w, b, [True, True, True])
        rms_norm(x, [4096], w)
        softmax_backward(g, shares, -1, torch.float32)
    torch.cuda.synchronize()


main()
