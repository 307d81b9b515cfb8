# several whole rows a program, in two dimensions, reduced along one
import triton
import triton.language as tl

CONFIGS = [{"BLOCK": 4096, "ROWS": r, "num_warps": w} for r, w in ((2, 8), (2, 16), (4, 16), (1, 8), (1, 4))]


def grid(meta, arguments, base):
    return (triton.cdiv(base[0], meta["ROWS"]),)


@triton.jit
def _row(x, y, weight, bias, mean, rstd, row, n, eps, BLOCK: tl.constexpr):
    x += row * n
    y += row * n
    if True:
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, n, BLOCK):
            at = start + tl.arange(0, BLOCK)
            total += tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
        center = tl.sum(total, axis=0) / n
        squares = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, n, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
            value = tl.where(at < n, value - center, 0.0)
            squares += value * value
        scale = 1 / tl.sqrt(tl.sum(squares, axis=0) / n + eps)
        tl.store(mean + row, center)
        tl.store(rstd + row, scale)
        for start in range(0, n, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
            w = tl.load(weight + at, mask=at < n).to(tl.float32)
            b = tl.load(bias + at, mask=at < n).to(tl.float32)
            tl.store(y + at, (value - center) * scale * w + b, mask=at < n)


@triton.jit
def layer_norm_kernel(
    x, y, weight, bias, mean, rstd, n, eps, BLOCK: tl.constexpr, ROWS: tl.constexpr, BASE_GRID_0
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    if n <= BLOCK:
        rows = first + tl.arange(0, ROWS)
        i = tl.arange(0, BLOCK)
        inside = (rows < BASE_GRID_0)[:, None] & (i < n)[None, :]
        at = rows[:, None] * n + i[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + i, mask=i < n, other=0.0).to(tl.float32)
        b = tl.load(bias + i, mask=i < n, other=0.0).to(tl.float32)
        center = tl.sum(value, axis=1) / n
        apart = tl.where((i < n)[None, :], value - center[:, None], 0.0)
        scale = 1 / tl.sqrt(tl.sum(apart * apart, axis=1) / n + eps)
        tl.store(mean + rows, center, mask=rows < BASE_GRID_0)
        tl.store(rstd + rows, scale, mask=rows < BASE_GRID_0)
        tl.store(y + at, apart * scale[:, None] * w[None, :] + b[None, :], mask=inside)
    else:
        for row in range(first, tl.minimum(first + ROWS, BASE_GRID_0)):
            _row(x, y, weight, bias, mean, rstd, row, n, eps, BLOCK)
