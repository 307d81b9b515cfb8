# programs that stay go over tiles of all rows
import triton
import triton.language as tl

CONFIGS = [
    {"TILE": t, "PROGRAMS": p, "num_warps": w}
    for t, p, w in ((1024, 1056, 4), (2048, 528, 8), (1024, 2112, 4), (512, 2112, 2), (2048, 1056, 8))
]


def grid(meta, arguments, base):
    return (min(meta["PROGRAMS"], base[0] * triton.cdiv(arguments["n"], meta["TILE"])),)


@triton.jit
def swiglu_backward_kernel(
    grad, gates, grad_gates, n, BLOCK: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr, BASE_GRID_0
):
    tiles = tl.cdiv(n, TILE)
    first = tl.program_id(0).to(tl.int64)
    for number in range(first, first * 0 + BASE_GRID_0 * tiles, tl.num_programs(0)):
        row = number // tiles
        i = (number - row * tiles) * TILE + tl.arange(0, TILE)
        inside = i < n
        g = tl.load(grad + row * n + i, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(gates + row * 2 * n + i, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(gates + row * 2 * n + n + i, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(a)
        tl.store(grad_gates + row * 2 * n + i, g * b * (s + a * s * (1 - s)), mask=inside)
        tl.store(grad_gates + row * 2 * n + n + i, g * a * s, mask=inside)
