# two passes: moments of chunks are joined (Chan), then the row is normalised
import triton
import triton.language as tl

CONFIGS = [{"BLOCK": b, "num_warps": w} for b, w in ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (1024, 2))]


@triton.jit
def layer_norm_kernel(x, y, weight, bias, mean, rstd, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * n
    y += row * n
    center = 0.0
    squares = 0.0
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(x + i, mask=i < n, other=0.0, eviction_policy="evict_last").to(tl.float32)
        count = tl.minimum(n - start, BLOCK).to(tl.float32)
        here = tl.sum(value, axis=0) / count
        apart = tl.where(i < n, value - here, 0.0)
        delta = here - center
        squares += tl.sum(apart * apart, axis=0) + delta * delta * start * count / (start + count)
        center += delta * count / (start + count)
    scale = 1 / tl.sqrt(squares / n + eps)
    tl.store(mean + row, center)
    tl.store(rstd + row, scale)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(x + i, mask=i < n, other=0.0, eviction_policy="evict_first").to(tl.float32)
        w = tl.load(weight + i, mask=i < n).to(tl.float32)
        b = tl.load(bias + i, mask=i < n).to(tl.float32)
        tl.store(y + i, (value - center) * scale * w + b, mask=i < n)
