# read once; results are written past the caches
import triton
import triton.language as tl

CONFIGS = [{"BLOCK": b, "num_warps": w} for b, w in ((4096, 8), (4096, 4), (4096, 16), (8192, 16))]


@triton.jit
def layer_norm_kernel(x, y, weight, bias, mean, rstd, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * n
    y += row * n
    if n <= BLOCK:
        i = tl.arange(0, BLOCK)
        value = tl.load(x + i, mask=i < n, other=0.0, cache_modifier=".cg").to(tl.float32)
        w = tl.load(weight + i, mask=i < n, other=0.0)
        b = tl.load(bias + i, mask=i < n, other=0.0)
        center = tl.sum(value, axis=0) / n
        apart = tl.where(i < n, value - center, 0.0)
        scale = 1 / tl.sqrt(tl.sum(apart * apart, axis=0) / n + eps)
        tl.store(mean + row, center)
        tl.store(rstd + row, scale)
        tl.store(y + i, apart * scale * w.to(tl.float32) + b.to(tl.float32), mask=i < n, cache_modifier=".cs")
    else:
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
