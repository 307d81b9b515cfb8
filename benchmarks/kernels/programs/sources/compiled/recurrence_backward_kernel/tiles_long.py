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
def recurrence_backward_kernel(
    decay,
    h,
    grad,
    grad_decay,
    grad_x,
    length,
    width,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    base = tl.program_id(1).to(tl.int64) * length * width
    r = tl.arange(0, TILE)
    state = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in range(0, length, TILE):
        t = length - 1 - start - r
        at = base + t[:, None] * width + column[None, :]
        inside = (t >= 0)[:, None] & (column < width)[None, :]
        a = tl.load(
            decay + at + width,
            mask=inside & (t < length - 1)[:, None],
            other=1.0,
            eviction_policy="evict_first",
        ).to(tl.float32)
        v = tl.load(grad + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        before = tl.load(
            h + at - width, mask=inside & (t > 0)[:, None], other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)
        a, v = tl.associative_scan((a, v), 0, _join)
        v += a * state[None, :]
        tl.store(grad_x + at, v, mask=inside)
        tl.store(grad_decay + at, v * before, mask=inside)
        state = tl.sum(tl.where(r[:, None] == TILE - 1, v, 0.0), axis=0)
