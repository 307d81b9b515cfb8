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
    r = tl.arange(0, TILE)
    t = length - 1 - r
    at = tl.program_id(1).to(tl.int64) * length * width + t[:, None] * width + column[None, :]
    mask = (column < width)[None, :]
    state = tl.zeros([COLUMNS], dtype=tl.float32)
    inside = mask & (t >= 0)[:, None]
    a = tl.load(decay + at + width, mask=inside & (r > 0)[:, None], other=1.0)
    v = tl.load(grad + at, mask=inside, other=0.0)
    before = tl.load(h + at - width, mask=mask & (t > 0)[:, None], other=0.0)
    for _start in range(0, length, TILE):
        t -= TILE
        following = mask & (t >= 0)[:, None]
        ahead = at - TILE * width
        a_later = tl.load(decay + ahead + width, mask=following, other=1.0)
        v_later = tl.load(grad + ahead, mask=following, other=0.0)
        before_later = tl.load(h + ahead - width, mask=mask & (t > 0)[:, None], other=0.0)
        whole, here = tl.associative_scan((a.to(tl.float32), v.to(tl.float32)), 0, _join)
        here += whole * state[None, :]
        tl.store(grad_x + at, here, mask=inside)
        tl.store(grad_decay + at, here * before.to(tl.float32), mask=inside)
        state = tl.sum(tl.where(r[:, None] == TILE - 1, here, 0.0), axis=0)
        a, v, before, inside = a_later, v_later, before_later, following
        at = ahead
