# a row in two halves that both stay in registers, so that the second is under way while the first is reduced
import triton
import triton.language as tl

CONFIGS = [{"BLOCK": b, "num_warps": w} for b, w in ((2048, 4), (2048, 8), (4096, 8), (4096, 16))]


@triton.jit
def layer_norm_kernel(x, y, weight, bias, mean, rstd, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * n
    y += row * n
    if n <= 2 * BLOCK:
        i = tl.arange(0, BLOCK)
        j = BLOCK + i
        low = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
        high = tl.load(x + j, mask=j < n, other=0.0).to(tl.float32)
        low_w = tl.load(weight + i, mask=i < n, other=0.0).to(tl.float32)
        high_w = tl.load(weight + j, mask=j < n, other=0.0).to(tl.float32)
        low_b = tl.load(bias + i, mask=i < n, other=0.0).to(tl.float32)
        high_b = tl.load(bias + j, mask=j < n, other=0.0).to(tl.float32)
        center = tl.sum(low + high, axis=0) / n
        low = tl.where(i < n, low - center, 0.0)
        high = tl.where(j < n, high - center, 0.0)
        scale = 1 / tl.sqrt(tl.sum(low * low + high * high, axis=0) / n + eps)
        tl.store(mean + row, center)
        tl.store(rstd + row, scale)
        tl.store(y + i, low * scale * low_w + low_b, mask=i < n)
        tl.store(y + j, high * scale * high_w + high_b, mask=j < n)
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
