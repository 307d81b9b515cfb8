# tiles of several rows in two dimensions
import triton
import triton.language as tl

CONFIGS = [
    {"ROWS": r, "TILE": t, "num_warps": w}
    for r, t, w in ((4, 512, 4), (2, 512, 4), (4, 256, 4), (8, 256, 8), (2, 512, 2), (4, 512, 8))
]


def grid(meta, arguments, base):
    return (triton.cdiv(arguments["n"], meta["TILE"]), triton.cdiv(base[0], meta["ROWS"]))


@triton.jit
def swiglu_backward_kernel(
    grad, gates, grad_gates, n, BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BASE_GRID_0
):
    row = (tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    i = (tl.program_id(0) * TILE + tl.arange(0, TILE))[None, :]
    inside = (row < BASE_GRID_0) & (i < n)
    g = tl.load(grad + row * n + i, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(gates + row * 2 * n + i, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(gates + row * 2 * n + n + i, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    tl.store(grad_gates + row * 2 * n + i, g * b * (s + a * s * (1 - s)), mask=inside)
    tl.store(grad_gates + row * 2 * n + n + i, g * a * s, mask=inside)
