# four time steps are loaded while the four before them are computed
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
    for _ in range(0, length, 4):
        a0n = tl.load(decay + at + 4 * width + 0 * width, mask=mask & (t + 4 + 0 < length), other=0.0)
        x0n = tl.load(x + at + 4 * width + 0 * width, mask=mask & (t + 4 + 0 < length), other=0.0)
        a1n = tl.load(decay + at + 4 * width + 1 * width, mask=mask & (t + 4 + 1 < length), other=0.0)
        x1n = tl.load(x + at + 4 * width + 1 * width, mask=mask & (t + 4 + 1 < length), other=0.0)
        a2n = tl.load(decay + at + 4 * width + 2 * width, mask=mask & (t + 4 + 2 < length), other=0.0)
        x2n = tl.load(x + at + 4 * width + 2 * width, mask=mask & (t + 4 + 2 < length), other=0.0)
        a3n = tl.load(decay + at + 4 * width + 3 * width, mask=mask & (t + 4 + 3 < length), other=0.0)
        x3n = tl.load(x + at + 4 * width + 3 * width, mask=mask & (t + 4 + 3 < length), other=0.0)
        state = a0.to(tl.float32) * state + x0.to(tl.float32)
        tl.store(h + at + 0 * width, state, mask=mask & (t + 0 < length))
        state = a1.to(tl.float32) * state + x1.to(tl.float32)
        tl.store(h + at + 1 * width, state, mask=mask & (t + 1 < length))
        state = a2.to(tl.float32) * state + x2.to(tl.float32)
        tl.store(h + at + 2 * width, state, mask=mask & (t + 2 < length))
        state = a3.to(tl.float32) * state + x3.to(tl.float32)
        tl.store(h + at + 3 * width, state, mask=mask & (t + 3 < length))
        a0, x0 = a0n, x0n
        a1, x1 = a1n, x1n
        a2, x2 = a2n, x2n
        a3, x3 = a3n, x3n
        at += 4 * width
        t += 4
