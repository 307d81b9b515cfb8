"""Device functions that the kernels of this hand are composed of."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prev_multiple_of(a, b):
    """The largest multiple of b that is smaller than a."""
    return tl.cdiv(a, b) * b - b


@triton.jit
def tile_range(index, TILE: tl.constexpr):
    return index * TILE + tl.arange(0, TILE)


@triton.jit
def grid_2d(rows, cols, row_stride):
    return rows[:, None] * row_stride + cols[None, :]


@triton.jit
def inside(rows, cols, M, N):
    return (rows[:, None] < M) & (cols[None, :] < N)


@triton.jit
def swizzled(pid, M, N, TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr):
    """Tile coordinates in an order that walks GROUP rows of tiles before the next column."""
    rows = tl.cdiv(M, TILE_M)
    cols = tl.cdiv(N, TILE_N)
    first = pid // (GROUP * cols) * GROUP
    height = min(rows - first, GROUP)
    return first + pid % (GROUP * cols) % height, pid % (GROUP * cols) // height


@triton.jit
def tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def gelu_erf(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def gelu_tanh_grad(x):
    t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
    inner = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x)
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def relu(x):
    return tl.maximum(x, 0.0)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        return relu(x)
    if ACTIVATION == "silu":
        return silu(x)
    if ACTIVATION == "gelu":
        return gelu_erf(x)
    if ACTIVATION == "gelu_tanh":
        return gelu_tanh(x)
    return x


@triton.jit
def safe_exp_shift(m):
    """A maximum to subtract: minus infinity, where nothing was seen, becomes zero."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def lse_merge(m_a, z_a, m_b, z_b):
    """Combine of two (maximum, sum of exponentials) pairs."""
    m = tl.maximum(m_a, m_b)
    shift = safe_exp_shift(m)
    return m, z_a * tl.exp(m_a - shift) + z_b * tl.exp(m_b - shift)


@triton.jit
def welford_push(mean, m2, count, x, mask):
    """Every lane takes in one more number, unless masked."""
    grown = count + mask.to(tl.float32)
    delta = tl.where(mask, x - mean, 0.0)
    moved = mean + delta / tl.maximum(grown, 1.0)
    return moved, m2 + delta * tl.where(mask, x - moved, 0.0), grown


@triton.jit
def welford_combine(mean_a, m2_a, count_a, mean_b, m2_b, count_b):
    count = count_a + count_b
    share = count_b / tl.maximum(count, 1.0)
    delta = mean_b - mean_a
    return mean_a + delta * share, m2_a + m2_b + delta * delta * count_a * share, count


@triton.jit
def first_max(value_a, index_a, value_b, index_b):
    """Combine of (value, index) pairs that keeps the larger value, of equal ones the first."""
    keep_a = (value_a > value_b) | ((value_a == value_b) & (index_a < index_b))
    return tl.where(keep_a, value_a, value_b), tl.where(keep_a, index_a, index_b)


@triton.jit
def last_max(value_a, index_a, value_b, index_b):
    """Combine of a scan of (value, index) pairs: of equal values the later one."""
    keep_b = value_b >= value_a
    return tl.where(keep_b, value_b, value_a), tl.where(keep_b, index_b, index_a)


@triton.jit
def affine_compose(a_left, b_left, a_right, b_right):
    """Combine of x -> a * x + b maps, the left one applied first."""
    return a_right * a_left, a_right * b_left + b_right
