# four time steps are loaded while the four before them are computed
import triton
import triton.language as tl

CONFIGS = [
    {"COLUMNS": c, "num_warps": w} for c, w in ((32, 1), (64, 1), (64, 2), (128, 2), (128, 4), (256, 4))
]


def grid(meta, arguments, base):
    return (triton.cdiv(arguments["width"], meta["COLUMNS"]), base[1])


@triton.jit
def recurrence_backward_kernel(
    decay, h, grad, grad_decay, grad_x, length, width, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < width
    at = tl.program_id(1).to(tl.int64) * length * width + column
    t = tl.program_id(0) * 0 + length - 1
    at += t * width
    state = tl.zeros([COLUMNS], dtype=tl.float32)
    a0 = tl.load(decay + at - 0 * width, mask=mask & (t - 0 >= 0), other=0.0)
    g0 = tl.load(grad + at - 0 * width, mask=mask & (t - 0 >= 0), other=0.0)
    h0 = tl.load(h + at - 1 * width, mask=mask & (t - 0 > 0), other=0.0)
    a1 = tl.load(decay + at - 1 * width, mask=mask & (t - 1 >= 0), other=0.0)
    g1 = tl.load(grad + at - 1 * width, mask=mask & (t - 1 >= 0), other=0.0)
    h1 = tl.load(h + at - 2 * width, mask=mask & (t - 1 > 0), other=0.0)
    a2 = tl.load(decay + at - 2 * width, mask=mask & (t - 2 >= 0), other=0.0)
    g2 = tl.load(grad + at - 2 * width, mask=mask & (t - 2 >= 0), other=0.0)
    h2 = tl.load(h + at - 3 * width, mask=mask & (t - 2 > 0), other=0.0)
    a3 = tl.load(decay + at - 3 * width, mask=mask & (t - 3 >= 0), other=0.0)
    g3 = tl.load(grad + at - 3 * width, mask=mask & (t - 3 >= 0), other=0.0)
    h3 = tl.load(h + at - 4 * width, mask=mask & (t - 3 > 0), other=0.0)
    for _ in range(0, length, 4):
        a0n = tl.load(decay + at - 4 * width - 0 * width, mask=mask & (t - 4 - 0 >= 0), other=0.0)
        g0n = tl.load(grad + at - 4 * width - 0 * width, mask=mask & (t - 4 - 0 >= 0), other=0.0)
        h0n = tl.load(h + at - 4 * width - 1 * width, mask=mask & (t - 4 - 0 > 0), other=0.0)
        a1n = tl.load(decay + at - 4 * width - 1 * width, mask=mask & (t - 4 - 1 >= 0), other=0.0)
        g1n = tl.load(grad + at - 4 * width - 1 * width, mask=mask & (t - 4 - 1 >= 0), other=0.0)
        h1n = tl.load(h + at - 4 * width - 2 * width, mask=mask & (t - 4 - 1 > 0), other=0.0)
        a2n = tl.load(decay + at - 4 * width - 2 * width, mask=mask & (t - 4 - 2 >= 0), other=0.0)
        g2n = tl.load(grad + at - 4 * width - 2 * width, mask=mask & (t - 4 - 2 >= 0), other=0.0)
        h2n = tl.load(h + at - 4 * width - 3 * width, mask=mask & (t - 4 - 2 > 0), other=0.0)
        a3n = tl.load(decay + at - 4 * width - 3 * width, mask=mask & (t - 4 - 3 >= 0), other=0.0)
        g3n = tl.load(grad + at - 4 * width - 3 * width, mask=mask & (t - 4 - 3 >= 0), other=0.0)
        h3n = tl.load(h + at - 4 * width - 4 * width, mask=mask & (t - 4 - 3 > 0), other=0.0)
        state += g0.to(tl.float32)
        tl.store(grad_x + at - 0 * width, state, mask=mask & (t - 0 >= 0))
        tl.store(grad_decay + at - 0 * width, state * h0.to(tl.float32), mask=mask & (t - 0 >= 0))
        state *= a0.to(tl.float32)
        state += g1.to(tl.float32)
        tl.store(grad_x + at - 1 * width, state, mask=mask & (t - 1 >= 0))
        tl.store(grad_decay + at - 1 * width, state * h1.to(tl.float32), mask=mask & (t - 1 >= 0))
        state *= a1.to(tl.float32)
        state += g2.to(tl.float32)
        tl.store(grad_x + at - 2 * width, state, mask=mask & (t - 2 >= 0))
        tl.store(grad_decay + at - 2 * width, state * h2.to(tl.float32), mask=mask & (t - 2 >= 0))
        state *= a2.to(tl.float32)
        state += g3.to(tl.float32)
        tl.store(grad_x + at - 3 * width, state, mask=mask & (t - 3 >= 0))
        tl.store(grad_decay + at - 3 * width, state * h3.to(tl.float32), mask=mask & (t - 3 >= 0))
        state *= a3.to(tl.float32)
        a0, g0, h0 = a0n, g0n, h0n
        a1, g1, h1 = a1n, g1n, h1n
        a2, g2, h2 = a2n, g2n, h2n
        a3, g3, h3 = a3n, g3n, h3n
        at -= 4 * width
        t -= 4
