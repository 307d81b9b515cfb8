# long tiles of few columns, the scan goes over warps, nothing read twice
import triton
import triton.language as tl

CONFIGS = [
    {"TILE": t, "COLUMNS": c, "num_warps": w}
    for t, c, w in ((256, 16, 4), (256, 16, 8), (512, 8, 4), (256, 32, 8), (128, 16, 4), (512, 16, 8))
]


def grid(meta, arguments, base):
    return (triton.cdiv(arguments["width"], meta["COLUMNS"]), base[1])


@triton.jit
def _join(a, h, b, k):
    return a * b, k + b * h


@triton.jit
def recurrence_kernel(
    decay, x, h, length, width, BLOCK: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    base = tl.program_id(1).to(tl.int64) * length * width
    r = tl.arange(0, TILE)
    state = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in range(0, length, TILE):
        t = start + r
        at = base + t[:, None] * width + column[None, :]
        inside = (t < length)[:, None] & (column < width)[None, :]
        a = tl.load(decay + at, mask=inside, other=1.0, eviction_policy="evict_first").to(tl.float32)
        v = tl.load(x + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        a, v = tl.associative_scan((a, v), 0, _join)
        v += a * state[None, :]
        tl.store(h + at, v, mask=inside)
        state = tl.sum(tl.where(r[:, None] == TILE - 1, v, 0.0), axis=0)
