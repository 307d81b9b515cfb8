# a row in a loop of small tiles: fewer registers, more programs at once
import triton
import triton.language as tl

CONFIGS = [{"TILE": t, "num_warps": w} for t, w in ((1024, 4), (2048, 8), (512, 2), (1024, 2), (2048, 4))]


@triton.jit
def swiglu_backward_kernel(grad, gates, grad_gates, n, BLOCK: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        inside = i < n
        g = tl.load(grad + row * n + i, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(gates + row * 2 * n + i, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(gates + row * 2 * n + n + i, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(a)
        tl.store(grad_gates + row * 2 * n + i, g * b * (s + a * s * (1 - s)), mask=inside)
        tl.store(grad_gates + row * 2 * n + n + i, g * a * s, mask=inside)
