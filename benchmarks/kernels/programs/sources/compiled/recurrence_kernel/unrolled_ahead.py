# eight time steps are loaded while the eight before them are computed
import triton
import triton.language as tl

CONFIGS = [
    {"COLUMNS": c, "num_warps": w} for c, w in ((32, 1), (64, 1), (64, 2), (128, 2), (128, 4), (256, 4))
]


def grid(meta, arguments, base):
    return (triton.cdiv(arguments["width"], meta["COLUMNS"]), base[1])


@triton.jit
def recurrence_kernel(decay, x, h, length, width, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < width
    at = tl.program_id(1).to(tl.int64) * length * width + column
    t = tl.program_id(0) * 0
    state = tl.zeros([COLUMNS], dtype=tl.float32)
    a0 = tl.load(decay + at + 0 * width, mask=mask & (t + 0 < length), other=0.0)
    x0 = tl.load(x + at + 0 * width, mask=mask & (t + 0 < length), other=0.0)
    a1 = tl.load(decay + at + 1 * width, mask=mask & (t + 1 < length), other=0.0)
    x1 = tl.load(x + at + 1 * width, mask=mask & (t + 1 < length), other=0.0)
    a2 = tl.load(decay + at + 2 * width, mask=mask & (t + 2 < length), other=0.0)
    x2 = tl.load(x + at + 2 * width, mask=mask & (t + 2 < length), other=0.0)
    a3 = tl.load(decay + at + 3 * width, mask=mask & (t + 3 < length), other=0.0)
    x3 = tl.load(x + at + 3 * width, mask=mask & (t + 3 < length), other=0.0)
    a4 = tl.load(decay + at + 4 * width, mask=mask & (t + 4 < length), other=0.0)
    x4 = tl.load(x + at + 4 * width, mask=mask & (t + 4 < length), other=0.0)
    a5 = tl.load(decay + at + 5 * width, mask=mask & (t + 5 < length), other=0.0)
    x5 = tl.load(x + at + 5 * width, mask=mask & (t + 5 < length), other=0.0)
    a6 = tl.load(decay + at + 6 * width, mask=mask & (t + 6 < length), other=0.0)
    x6 = tl.load(x + at + 6 * width, mask=mask & (t + 6 < length), other=0.0)
    a7 = tl.load(decay + at + 7 * width, mask=mask & (t + 7 < length), other=0.0)
    x7 = tl.load(x + at + 7 * width, mask=mask & (t + 7 < length), other=0.0)
    for _ in range(0, length, 8):
        a0n = tl.load(decay + at + 8 * width + 0 * width, mask=mask & (t + 8 + 0 < length), other=0.0)
        x0n = tl.load(x + at + 8 * width + 0 * width, mask=mask & (t + 8 + 0 < length), other=0.0)
        a1n = tl.load(decay + at + 8 * width + 1 * width, mask=mask & (t + 8 + 1 < length), other=0.0)
        x1n = tl.load(x + at + 8 * width + 1 * width, mask=mask & (t + 8 + 1 < length), other=0.0)
        a2n = tl.load(decay + at + 8 * width + 2 * width, mask=mask & (t + 8 + 2 < length), other=0.0)
        x2n = tl.load(x + at + 8 * width + 2 * width, mask=mask & (t + 8 + 2 < length), other=0.0)
        a3n = tl.load(decay + at + 8 * width + 3 * width, mask=mask & (t + 8 + 3 < length), other=0.0)
        x3n = tl.load(x + at + 8 * width + 3 * width, mask=mask & (t + 8 + 3 < length), other=0.0)
        a4n = tl.load(decay + at + 8 * width + 4 * width, mask=mask & (t + 8 + 4 < length), other=0.0)
        x4n = tl.load(x + at + 8 * width + 4 * width, mask=mask & (t + 8 + 4 < length), other=0.0)
        a5n = tl.load(decay + at + 8 * width + 5 * width, mask=mask & (t + 8 + 5 < length), other=0.0)
        x5n = tl.load(x + at + 8 * width + 5 * width, mask=mask & (t + 8 + 5 < length), other=0.0)
        a6n = tl.load(decay + at + 8 * width + 6 * width, mask=mask & (t + 8 + 6 < length), other=0.0)
        x6n = tl.load(x + at + 8 * width + 6 * width, mask=mask & (t + 8 + 6 < length), other=0.0)
        a7n = tl.load(decay + at + 8 * width + 7 * width, mask=mask & (t + 8 + 7 < length), other=0.0)
        x7n = tl.load(x + at + 8 * width + 7 * width, mask=mask & (t + 8 + 7 < length), other=0.0)
        state = a0.to(tl.float32) * state + x0.to(tl.float32)
        tl.store(h + at + 0 * width, state, mask=mask & (t + 0 < length))
        state = a1.to(tl.float32) * state + x1.to(tl.float32)
        tl.store(h + at + 1 * width, state, mask=mask & (t + 1 < length))
        state = a2.to(tl.float32) * state + x2.to(tl.float32)
        tl.store(h + at + 2 * width, state, mask=mask & (t + 2 < length))
        state = a3.to(tl.float32) * state + x3.to(tl.float32)
        tl.store(h + at + 3 * width, state, mask=mask & (t + 3 < length))
        state = a4.to(tl.float32) * state + x4.to(tl.float32)
        tl.store(h + at + 4 * width, state, mask=mask & (t + 4 < length))
        state = a5.to(tl.float32) * state + x5.to(tl.float32)
        tl.store(h + at + 5 * width, state, mask=mask & (t + 5 < length))
        state = a6.to(tl.float32) * state + x6.to(tl.float32)
        tl.store(h + at + 6 * width, state, mask=mask & (t + 6 < length))
        state = a7.to(tl.float32) * state + x7.to(tl.float32)
        tl.store(h + at + 7 * width, state, mask=mask & (t + 7 < length))
        a0, x0 = a0n, x0n
        a1, x1 = a1n, x1n
        a2, x2 = a2n, x2n
        a3, x3 = a3n, x3n
        a4, x4 = a4n, x4n
        a5, x5 = a5n, x5n
        a6, x6 = a6n, x6n
        a7, x7 = a7n, x7n
        at += 8 * width
        t += 8
