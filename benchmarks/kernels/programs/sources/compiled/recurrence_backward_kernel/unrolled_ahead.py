# eight time steps are loaded while the eight before them are computed
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
    a4 = tl.load(decay + at - 4 * width, mask=mask & (t - 4 >= 0), other=0.0)
    g4 = tl.load(grad + at - 4 * width, mask=mask & (t - 4 >= 0), other=0.0)
    h4 = tl.load(h + at - 5 * width, mask=mask & (t - 4 > 0), other=0.0)
    a5 = tl.load(decay + at - 5 * width, mask=mask & (t - 5 >= 0), other=0.0)
    g5 = tl.load(grad + at - 5 * width, mask=mask & (t - 5 >= 0), other=0.0)
    h5 = tl.load(h + at - 6 * width, mask=mask & (t - 5 > 0), other=0.0)
    a6 = tl.load(decay + at - 6 * width, mask=mask & (t - 6 >= 0), other=0.0)
    g6 = tl.load(grad + at - 6 * width, mask=mask & (t - 6 >= 0), other=0.0)
    h6 = tl.load(h + at - 7 * width, mask=mask & (t - 6 > 0), other=0.0)
    a7 = tl.load(decay + at - 7 * width, mask=mask & (t - 7 >= 0), other=0.0)
    g7 = tl.load(grad + at - 7 * width, mask=mask & (t - 7 >= 0), other=0.0)
    h7 = tl.load(h + at - 8 * width, mask=mask & (t - 7 > 0), other=0.0)
    for _ in range(0, length, 8):
        a0n = tl.load(decay + at - 8 * width - 0 * width, mask=mask & (t - 8 - 0 >= 0), other=0.0)
        g0n = tl.load(grad + at - 8 * width - 0 * width, mask=mask & (t - 8 - 0 >= 0), other=0.0)
        h0n = tl.load(h + at - 8 * width - 1 * width, mask=mask & (t - 8 - 0 > 0), other=0.0)
        a1n = tl.load(decay + at - 8 * width - 1 * width, mask=mask & (t - 8 - 1 >= 0), other=0.0)
        g1n = tl.load(grad + at - 8 * width - 1 * width, mask=mask & (t - 8 - 1 >= 0), other=0.0)
        h1n = tl.load(h + at - 8 * width - 2 * width, mask=mask & (t - 8 - 1 > 0), other=0.0)
        a2n = tl.load(decay + at - 8 * width - 2 * width, mask=mask & (t - 8 - 2 >= 0), other=0.0)
        g2n = tl.load(grad + at - 8 * width - 2 * width, mask=mask & (t - 8 - 2 >= 0), other=0.0)
        h2n = tl.load(h + at - 8 * width - 3 * width, mask=mask & (t - 8 - 2 > 0), other=0.0)
        a3n = tl.load(decay + at - 8 * width - 3 * width, mask=mask & (t - 8 - 3 >= 0), other=0.0)
        g3n = tl.load(grad + at - 8 * width - 3 * width, mask=mask & (t - 8 - 3 >= 0), other=0.0)
        h3n = tl.load(h + at - 8 * width - 4 * width, mask=mask & (t - 8 - 3 > 0), other=0.0)
        a4n = tl.load(decay + at - 8 * width - 4 * width, mask=mask & (t - 8 - 4 >= 0), other=0.0)
        g4n = tl.load(grad + at - 8 * width - 4 * width, mask=mask & (t - 8 - 4 >= 0), other=0.0)
        h4n = tl.load(h + at - 8 * width - 5 * width, mask=mask & (t - 8 - 4 > 0), other=0.0)
        a5n = tl.load(decay + at - 8 * width - 5 * width, mask=mask & (t - 8 - 5 >= 0), other=0.0)
        g5n = tl.load(grad + at - 8 * width - 5 * width, mask=mask & (t - 8 - 5 >= 0), other=0.0)
        h5n = tl.load(h + at - 8 * width - 6 * width, mask=mask & (t - 8 - 5 > 0), other=0.0)
        a6n = tl.load(decay + at - 8 * width - 6 * width, mask=mask & (t - 8 - 6 >= 0), other=0.0)
        g6n = tl.load(grad + at - 8 * width - 6 * width, mask=mask & (t - 8 - 6 >= 0), other=0.0)
        h6n = tl.load(h + at - 8 * width - 7 * width, mask=mask & (t - 8 - 6 > 0), other=0.0)
        a7n = tl.load(decay + at - 8 * width - 7 * width, mask=mask & (t - 8 - 7 >= 0), other=0.0)
        g7n = tl.load(grad + at - 8 * width - 7 * width, mask=mask & (t - 8 - 7 >= 0), other=0.0)
        h7n = tl.load(h + at - 8 * width - 8 * width, mask=mask & (t - 8 - 7 > 0), other=0.0)
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
        state += g4.to(tl.float32)
        tl.store(grad_x + at - 4 * width, state, mask=mask & (t - 4 >= 0))
        tl.store(grad_decay + at - 4 * width, state * h4.to(tl.float32), mask=mask & (t - 4 >= 0))
        state *= a4.to(tl.float32)
        state += g5.to(tl.float32)
        tl.store(grad_x + at - 5 * width, state, mask=mask & (t - 5 >= 0))
        tl.store(grad_decay + at - 5 * width, state * h5.to(tl.float32), mask=mask & (t - 5 >= 0))
        state *= a5.to(tl.float32)
        state += g6.to(tl.float32)
        tl.store(grad_x + at - 6 * width, state, mask=mask & (t - 6 >= 0))
        tl.store(grad_decay + at - 6 * width, state * h6.to(tl.float32), mask=mask & (t - 6 >= 0))
        state *= a6.to(tl.float32)
        state += g7.to(tl.float32)
        tl.store(grad_x + at - 7 * width, state, mask=mask & (t - 7 >= 0))
        tl.store(grad_decay + at - 7 * width, state * h7.to(tl.float32), mask=mask & (t - 7 >= 0))
        state *= a7.to(tl.float32)
        a0, g0, h0 = a0n, g0n, h0n
        a1, g1, h1 = a1n, g1n, h1n
        a2, g2, h2 = a2n, g2n, h2n
        a3, g3, h3 = a3n, g3n, h3n
        a4, g4, h4 = a4n, g4n, h4n
        a5, g5, h5 = a5n, g5n, h5n
        a6, g6, h6 = a6n, g6n, h6n
        a7, g7, h7 = a7n, g7n, h7n
        at -= 8 * width
        t -= 8
