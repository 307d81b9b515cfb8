# rows as one flat array: every program is full
import triton
import triton.language as tl

CONFIGS = [
    {"TILE": t, "num_warps": w} for t, w in ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (1024, 2), (512, 2))
]


def grid(meta, arguments, base):
    return (triton.cdiv(base[0] * arguments["n"], meta["TILE"]),)


@triton.jit
def swiglu_backward_kernel(grad, gates, grad_gates, n, BLOCK: tl.constexpr, TILE: tl.constexpr, BASE_GRID_0):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    row = at // n
    i = at - row * n
    inside = row < BASE_GRID_0
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(gates + row * 2 * n + i, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(gates + row * 2 * n + n + i, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    tl.store(grad_gates + row * 2 * n + i, g * b * (s + a * s * (1 - s)), mask=inside)
    tl.store(grad_gates + row * 2 * n + n + i, g * a * s, mask=inside)
