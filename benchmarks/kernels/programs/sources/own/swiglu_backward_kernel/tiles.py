# a row in tiles that waste little of the last one
import triton
import triton.language as tl

CONFIGS = [
    {"TILE": t, "num_warps": w}
    for t, w in ((512, 2), (512, 4), (1024, 4), (256, 2), (2048, 8), (256, 1), (1024, 8))
]


def grid(meta, arguments, base):
    return (triton.cdiv(arguments["n"], meta["TILE"]), base[0])


@triton.jit
def swiglu_backward_kernel(grad, gates, grad_gates, n, BLOCK: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = i < n
    g = tl.load(grad + row * n + i, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(gates + row * 2 * n + i, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(gates + row * 2 * n + n + i, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    tl.store(grad_gates + row * 2 * n + i, g * b * (s + a * s * (1 - s)), mask=inside)
    tl.store(grad_gates + row * 2 * n + n + i, g * a * s, mask=inside)
