"""Kernels for the rewrites of syntax trees, and changes to them after which a rewrite must not apply any more."""

from __future__ import annotations

HEAD = "import triton\nimport triton.language as tl\n\n\n"

SOFTMAX = (
    HEAD
    + '''
@triton.jit
def softmax(y_ptr, x_ptr, stride, n_cols, BLOCK: tl.constexpr):
    """Two passes over a row, # with a comment."""
    row = tl.program_id(0)
    x_ptr += row * stride  # a parameter that is assigned
    y_ptr += row * stride
    m = float("-inf")
    total = 0.0
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=float("-inf")).to(tl.float32)
        m = tl.maximum(m, tl.max(x, axis=0))
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=float("-inf")).to(tl.float32)
        total += tl.sum(tl.exp(x - m), axis=0)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < n_cols, other=float("-inf")).to(tl.float32)
        tl.store(y_ptr + cols, tl.exp(x - m) / total, mask=cols < n_cols)
'''
)

MATMUL = (
    HEAD
    + """
@triton.jit
def scaled(x, factor):
    return x * factor


@triton.jit
def matmul(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    pid = tl.program_id(axis=0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid_m = pid // tiles_n
    pid_n = pid % tiles_n
    offs_m = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    offs_n = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + (offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak)
    b_ptrs = b_ptr + (offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k * BLOCK_K, other=0.0)
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BLOCK_K, other=0.0)
        acc += tl.dot(a, b)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    c = scaled(acc.to(tl.float32), 1.0)
    offs_cm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_cn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    c_ptrs = c_ptr + stride_cm * offs_cm[:, None] + stride_cn * offs_cn[None, :]
    tl.store(c_ptrs, c, mask=(offs_cm[:, None] < M) & (offs_cn[None, :] < N))
"""
)

ROWS = (
    HEAD
    + """
EPS = tl.constexpr(1e-5)


@triton.jit
def normalise(x, mean, rstd):
    y = (x - mean) * rstd  # two statements: not an expression
    return y


@triton.jit
def rows(x_ptr, w_ptr, y_ptr, n_rows, n_cols, BLOCK: tl.constexpr, PER: tl.constexpr = 2):
    first = tl.program_id(0).to(tl.int64) * PER
    if first >= n_rows:
        return
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    for row in range(first, tl.minimum(first + PER, n_rows)):
        x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(x, axis=0) / n_cols
        centred = tl.where(mask, x - mean, 0.0)
        rstd = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / n_cols + EPS)
        w = tl.load(w_ptr + cols, mask=mask, other=1.0).to(tl.float32)
        tl.store(y_ptr + row * n_cols + cols, normalise(x, mean, rstd) * w, mask=mask)
"""
)

TILES = (
    HEAD
    + """
@triton.jit
def tiles(x_ptr, w_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    at = rows[:, None] * N + cols[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    low = tl.min(x, axis=1)
    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0)
    for i in tl.static_range(2):
        x = x * (i + 1)
    tl.store(y_ptr + at, x * w[None, :] + low[:, None], mask=inside)
"""
)

CAUSAL = (
    HEAD
    + """
@triton.jit
def causal(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    here = tl.program_id(0)
    rows = here * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in tl.range(0, (here + 1) * BLOCK, BLOCK, num_stages=1):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < n, other=0.0)
        total += tl.sum(tl.where(cols[None, :] <= rows[:, None], x[None, :], 0.0), axis=1)
    tl.store(y_ptr + rows, total, mask=rows < n)
"""
)

STRIDED = (
    HEAD
    + """
@triton.jit
def strided(x_ptr, scale_ptr, y_ptr, n, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    part = tl.program_id(0)
    total = 0.0
    for start in range(part * BLOCK, n, BLOCK * PARTS):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)
        total += tl.sum(x * tl.load(scale_ptr + part), axis=0)
    tl.store(y_ptr + part, total)
"""
)

LOCK = (
    HEAD
    + """
@triton.jit
def lock(x_ptr, lock_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(y_ptr, tl.load(y_ptr) + tl.sum(x))
    tl.atomic_xchg(lock_ptr, 0)
"""
)

FLAT = (
    HEAD
    + """
@triton.jit
def flat(x_ptr, table_ptr, index_ptr, w_ptr, y_ptr, n, width, height, BLOCK: tl.constexpr):
    begin = tl.program_id(0) * BLOCK
    at = begin + tl.arange(0, BLOCK)[:]
    inside = at < n
    col = at % width
    row = at // width
    place = row % height
    x = tl.load(x_ptr + at, inside).to(tl.float32)
    index = tl.load(index_ptr + row, inside, eviction_policy="evict_last")
    entry = tl.load(table_ptr + (col + width * index), inside).to(tl.float32)
    w = tl.load(w_ptr + (col + width * place), inside, other=0.0).to(tl.float32)
    y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476)) + entry * tl.sigmoid(w)
    tl.store(y_ptr + at, y + x / (1.0 + tl.exp(-w)), inside)
"""
)
"""A flat index that is divided into rows and columns, and functions that the compiler spells out."""

SIMPLE_TILES = TILES.replace("    for i in tl.static_range(2):\n        x = x * (i + 1)\n", "")
"""The same, without any loop."""

ODD = (
    HEAD.replace("as tl", "as tl\nfrom triton.language.extra import libdevice")
    + """
LIMIT = tl.constexpr(8)


@triton.jit(noinline=True, do_not_specialize=["n"])
def noise(seed: tl.constexpr, at, *, low=0.0):
    return libdevice.tanh(tl.rand(seed, at)) + low


@triton.jit
def merge(a, b):
    return a + b


@triton.heuristics({"EVEN": lambda args: args["n"] % 16 == 0})
@triton.jit
def odd(
    x_ptr, /, y_ptr, n: "i32", *, BLOCK: tl.constexpr, EVEN: tl.constexpr, FLAG: tl.constexpr = 0
) -> None:
    '''A docstring with "quotes" and # a hash.'''
    tl.static_assert(BLOCK <= 1024, "too wide"); pid = tl.program_id(0)
    HALF: tl.constexpr = BLOCK // 2
    (first, (second, _)), other = ((pid, (pid + 1, 0)), 0.0)
    at = first * BLOCK + tl.arange(0, BLOCK)
    pair = tl.associative_scan((at, at), 0, merge) if FLAG else (at, at)
    picked = lambda v: v  # noqa
    if not EVEN and (inside := n - pid * BLOCK) > 0:
        x = tl.load(x_ptr + at, mask=at < n, other=other)
    elif EVEN:
        x = tl.load(x_ptr + at)
    else:
        x = tl.zeros([BLOCK], tl.float32)
    for i, in ((0,),):
        x += i
    for j in tl.static_range(0, LIMIT, 2):
        for k in range(*(0, 3)):
            x += tl.load(x_ptr + j + k) if j else noise(7, at)
    step = 0
    while step < 3:
        step += 1
        if step == 2:
            continue
        x = x * 2.0
    else:
        x += 1.0
    for m in tl.range(n, 0, -1, num_stages=2):
        if m > 5:
            break
        x += m
    assert HALF > 0, "positive"
    x = [x, x][0]
    tl.store(y_ptr + at, x, at < n)
    return
"""
)
"""No one writes all of this in one kernel; no part of it may confuse a rewrite."""

MOMENTS = (
    HEAD
    + """
@triton.jit
def moments(x_ptr, y_ptr, n, scale, BLOCK: tl.constexpr):
    row = tl.program_id(1) * 3 + tl.program_id(0)
    at = x_ptr + row * n
    count = 0.0
    total = tl.zeros([BLOCK], dtype=tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(at + i, mask=i < n, other=0.0).to(tl.float32)
        count = count + tl.sum((i < n).to(tl.float32))
        total += x
        squares = x * x + squares
    mean = tl.sum(total) / count
    spread = tl.sum(squares) / count - mean * mean
    tl.store(y_ptr + row, mean + scale * spread)
"""
)
"""Three sums in one loop, one of them a number, on two grid axes; a result in half precision."""

EVERY = {
    "softmax": SOFTMAX,
    "matmul": MATMUL,
    "rows": ROWS,
    "tiles": TILES,
    "causal": CAUSAL,
    "strided": STRIDED,
    "lock": LOCK,
    "flat": FLAT,
}


_LOOP = "m = tl.maximum(m, tl.max(x, axis=0))"
_SUM = "total += tl.sum(tl.exp(x - m), axis=0)"
_UPDATE = "tl.store(x_ptr + cols, x, mask=cols < n_cols)"
_FLOAT = (".to(tl.float32)", "")

REFUSED: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "pipeline: the loops read what they write": (
        "softmax",
        [("tl.store(y_ptr + cols", "tl.store(x_ptr + cols"), (_LOOP, _UPDATE), (_SUM, _UPDATE)],
    ),
    "peel: a comparison that is no bound": ("softmax", [("cols < n_cols", "cols != n_cols")]),
    "peel: the block moves twice as far": ("softmax", [("= start + tl.", "= 2 * start + tl.")]),
    "peel: offsets that are loaded": (
        "softmax",
        [("= start + tl.arange(0, BLOCK)", "= tl.load(x_ptr + start + tl.arange(0, BLOCK))")],
    ),
    "peel: every element has a bound of its own": (
        "softmax",
        [("cols < n_cols", "cols < tl.load(y_ptr + tl.arange(0, BLOCK))")],
    ),
    "peel: a bound that is a block": (
        "softmax",
        [
            ("    m = float", "    ends = tl.load(y_ptr + tl.arange(0, BLOCK))\n    m = float"),
            ("cols < n_cols", "cols < ends"),
        ],
    ),
    "peel: an iteration may end the loop": (
        "softmax",
        [("        x = tl.load", "        if start > 99:\n            break\n        x = tl.load")],
    ),
    "peel: the loop runs downwards": ("softmax", [("range(0, n_cols, BLOCK)", "range(n_cols, 0, -BLOCK)")]),
    "one-pass: the row is written in between": ("softmax", [(_LOOP, _UPDATE), (_SUM, _UPDATE)]),
    "one-pass: a return inside": (
        "softmax",
        [("    for start", "    if n_cols > 99:\n        return\n    for start")],
    ),
    "one-pass: rows do not begin at zero": ("softmax", [("range(0,", "range(1,")]),
    "exp2: the type does not show": ("softmax", [_FLOAT]),
    "interior: a comparison that is no bound": (
        "tiles",
        [("rows < M", "rows != M"), ("cols < N", "cols != N")],
    ),
    "interior: every element has a bound of its own": (
        "flat",
        [("inside = at < n", "inside = at < tl.load(index_ptr + at)")],
    ),
    "interior: the mask makes the block": (
        "causal",
        [("tl.store(y_ptr + rows, total, mask=rows < n)", "tl.store(y_ptr, 1.0, mask=rows < n)")],
    ),
    "interior: a return in what would stand twice": (
        "flat",
        [("    entry =", "    if n < 0:\n        return\n    entry =")],
    ),
    "sigmoid: of what may not be float32": (
        "flat",
        [("inside, other=0.0).to(tl.float32)", "inside, other=0.0)")],
    ),
}
"""By `rewrite: why not`: a kernel, and changes to it."""
