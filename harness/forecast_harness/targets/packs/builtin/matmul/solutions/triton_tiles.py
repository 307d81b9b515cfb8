import torch
import triton
import triton.language as tl


@triton.jit
def _matmul(a, b, c, m, n, k, am, ak, bk, bn, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, k, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        left = tl.load(
            a + rows[:, None] * am + inner[None, :] * ak,
            mask=(rows[:, None] < m) & (inner[None, :] < k),
            other=0.0,
        )
        right = tl.load(
            b + inner[:, None] * bk + columns[None, :] * bn,
            mask=(inner[:, None] < k) & (columns[None, :] < n),
            other=0.0,
        )
        total += tl.dot(left, right)
    where = c + rows[:, None] * n + columns[None, :]
    tl.store(where, total.to(tl.float16), mask=(rows[:, None] < m) & (columns[None, :] < n))


def run(a, b):
    c = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(a.shape[0], 32), triton.cdiv(b.shape[1], 32))
    _matmul[grid](a, b, c, a.shape[0], b.shape[1], a.shape[1], *a.stride(), *b.stride(), 32)
    return c
