# tiles of time steps, each loaded while the one before it is scanned
import triton
import triton.language as tl

CONFIGS = [
    {"TILE": t, "COLUMNS": c, "num_warps": w}
    for t, c, w in (
        (32, 32, 1),
        (64, 32, 2),
        (64, 16, 1),
        (128, 32, 4),
        (32, 64, 2),
        (128, 16, 2),
        (64, 64, 4),
    )
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
    r = tl.arange(0, TILE)
    at = tl.program_id(1).to(tl.int64) * length * width + r[:, None] * width + column[None, :]
    mask = (column < width)[None, :]
    state = tl.zeros([COLUMNS], dtype=tl.float32)
    inside = mask & (r < length)[:, None]
    a = tl.load(decay + at, mask=inside, other=1.0)
    v = tl.load(x + at, mask=inside, other=0.0)
    for start in range(0, length, TILE):
        following = mask & (start + TILE + r < length)[:, None]
        a_later = tl.load(decay + at + TILE * width, mask=following, other=1.0)
        v_later = tl.load(x + at + TILE * width, mask=following, other=0.0)
        whole, here = tl.associative_scan((a.to(tl.float32), v.to(tl.float32)), 0, _join)
        here += whole * state[None, :]
        tl.store(h + at, here, mask=inside)
        state = tl.sum(tl.where(r[:, None] == TILE - 1, here, 0.0), axis=0)
        a, v, inside = a_later, v_later, following
        at += TILE * width
