"""Changes to the kernels after which a rewrite must not apply any more, each with the reason."""

from __future__ import annotations

_LOOP = "m = tl.maximum(m, tl.max(x, axis=0))"
_SUM = "total += tl.sum(tl.exp(x - m), axis=0)"
_UPDATE = "tl.store(x_ptr + cols, x, mask=cols < n_cols)"
_DOT = "acc += tl.dot(a, b)"
_STATIC = ("    for i in tl.static_range(2):\n        x = x * (i + 1)\n", "")
_FLOAT = (".to(tl.float32)", "")

REFUSED: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "pipeline: the loops read what they write": (
        "pipeline",
        "softmax",
        [("tl.store(y_ptr + cols", "tl.store(x_ptr + cols"), (_LOOP, _UPDATE), (_SUM, _UPDATE)],
    ),
    "peel: a comparison that is no bound": ("peel", "softmax", [("cols < n_cols", "cols != n_cols")]),
    "peel: the block moves twice as far": ("peel", "softmax", [("= start + tl.", "= 2 * start + tl.")]),
    "peel: offsets that are loaded": (
        "peel",
        "softmax",
        [("= start + tl.arange(0, BLOCK)", "= tl.load(x_ptr + start + tl.arange(0, BLOCK))")],
    ),
    "peel: every element has a bound of its own": (
        "peel",
        "softmax",
        [("cols < n_cols", "cols < tl.load(y_ptr + tl.arange(0, BLOCK))")],
    ),
    "peel: a bound that is a block": (
        "peel",
        "softmax",
        [
            ("    m = float", "    ends = tl.load(y_ptr + tl.arange(0, BLOCK))\n    m = float"),
            ("cols < n_cols", "cols < ends"),
        ],
    ),
    "peel: an iteration may end the loop": (
        "peel",
        "softmax",
        [("        x = tl.load", "        if start > 99:\n            break\n        x = tl.load")],
    ),
    "peel: the loop runs downwards": (
        "peel",
        "softmax",
        [("range(0, n_cols, BLOCK)", "range(n_cols, 0, -BLOCK)")],
    ),
    "hoist: the loop writes what would be loaded before": (
        "hoist",
        "rows",
        [("tl.store(y_ptr", "tl.store(w_ptr")],
    ),
    "hoist: only some iterations load": (
        "hoist",
        "rows",
        [("other=1.0).to(tl.float32)", "other=1.0).to(tl.float32) if row else 1.0")],
    ),
    "hoist: a helper writes": ("hoist", "rows", [("    y = (x", "    tl.store(x, mean)\n    y = (x")]),
    "load-early: a store stands between": (
        "load-early",
        "tiles",
        [("    w = tl.load", "    tl.store(w_ptr, 0.0)\n    w = tl.load")],
    ),
    "load-early: the program may have left": (
        "load-early",
        "tiles",
        [("    w = tl.load", "    if M < 9:\n        return\n    w = tl.load")],
    ),
    "load-early: the address is computed from the reduction": (
        "load-early",
        "tiles",
        [("w_ptr + cols", "w_ptr + cols + low.to(tl.int32)")],
    ),
    "one-pass: the row is written in between": (
        "one-pass",
        "softmax",
        [(_LOOP, _UPDATE), (_SUM, _UPDATE)],
    ),
    "one-pass: a return inside": (
        "one-pass",
        "softmax",
        [("    for start", "    if n_cols > 99:\n        return\n    for start")],
    ),
    "one-pass: rows do not begin at zero": ("one-pass", "softmax", [("range(0,", "range(1,")]),
    "turn-back: iterations hand something on": (
        "turn-back",
        "softmax",
        [("tl.store(y_ptr + cols", "total += 1.0\n        tl.store(y_ptr + cols")],
    ),
    "turn-back: iterations write the same place": (
        "turn-back",
        "softmax",
        [("tl.store(y_ptr + cols,", "tl.store(y_ptr + tl.arange(0, BLOCK),")],
    ),
    "lane-sums: the sums are needed in the loop": (
        "lane-sums",
        "softmax",
        [("tl.exp(x - m), axis=0", "x + total, axis=0"), ("tl.max(x, axis=0)", "tl.max(x + m, axis=0)")],
    ),
    "lane-sums: the type does not show": ("lane-sums", "softmax", [_FLOAT]),
    "exp2: the type does not show": ("exp2", "softmax", [_FLOAT]),
    "reciprocal: the type does not show": ("reciprocal", "softmax", [_FLOAT]),
    "reciprocal: by a constant": ("reciprocal", "softmax", [("/ total", "/ 2.0")]),
    "accumulate: the accumulator is no float32": (
        "accumulate",
        "matmul",
        [("dtype=tl.float32", "dtype=tl.int32")],
    ),
    "accumulate: the dot says its type": (
        "accumulate",
        "matmul",
        [("(a, b)", "(a, b, out_dtype=tl.float32)")],
    ),
    "reverse: all loops are equally long": (
        "reverse",
        "causal",
        [("0, (here + 1) * BLOCK", "here * BLOCK, (here + 1) * BLOCK")],
    ),
    "group: the kernel groups by itself": (
        "group",
        "matmul",
        [("pid_n = pid % tiles_n", "pid_n = pid % tiles_n // min(M - pid, 8)")],
    ),
    "group: the rest is of another division": (
        "group",
        "matmul",
        [("pid % tiles_n", "pid % tl.cdiv(N, BLOCK_M)")],
    ),
    "exchange: programs wait for one another": (
        "exchange",
        "tiles",
        [("    low = ", "    tl.atomic_cas(y_ptr, 0, 0)\n    low = ")],
    ),
    "persist: programs wait for one another": ("persist", "lock", []),
    "persist: the number of programs is read": (
        "persist",
        "causal",
        [("mask=rows < n", "mask=rows < tl.num_programs(0)")],
    ),
    "persist: a helper asks for its program": (
        "persist",
        "rows",
        [("y = (x - mean) * rstd", "y = (x - mean) * rstd * tl.program_id(0)")],
    ),
    "persist: a return inside a loop": (
        "persist",
        "rows",
        [("        mean = ", "        if row > 5:\n            return\n        mean = ")],
    ),
    "two-tiles: a loop": ("two-tiles", "tiles", []),
    "two-tiles: it writes what it reads": ("two-tiles", "tiles", [_STATIC, ("store(y_ptr", "store(x_ptr")]),
    "split-sum: a bias is added": (
        "split-sum",
        "split",
        [("acc.to(tl.float32)", "acc.to(tl.float32) + 1.0")],
    ),
    "split-sum: the sum is scaled": ("split-sum", "matmul", []),
    "split-sum: the sum does not begin at zero": (
        "split-sum",
        "split",
        [("    for k in", "    acc += 1.0\n    for k in")],
    ),
    "describe: masked elements are not zero": ("describe", "matmul", [("other=0.0", "other=1.0")]),
    "describe: rows are gathered": (
        "describe",
        "matmul",
        [
            ("offs_m = (", "rows = tl.load(c_ptr + tl.arange(0, BLOCK_M))\n    offs_m = (rows + "),
            ("offs_n = (", "columns = tl.load(c_ptr + tl.arange(0, BLOCK_N))\n    offs_n = (columns + "),
        ],
    ),
    "describe: rows beyond the end are stored": (
        "describe",
        "matmul",
        [("mask=(offs_cm[:, None] < M) & (offs_cn[None, :] < N)", "mask=offs_cm[:, None] < 64")],
    ),
    "describe: rows beyond the end are summed": (
        "describe",
        "matmul",
        [(_DOT, "acc += tl.dot(a, b) + tl.sum(a) + tl.sum(b)")],
    ),
    "interior: a comparison that is no bound": (
        "interior",
        "tiles",
        [("rows < M", "rows != M"), ("cols < N", "cols != N")],
    ),
    "interior: every element has a bound of its own": (
        "interior",
        "flat",
        [("inside = at < n", "inside = at < tl.load(index_ptr + at)")],
    ),
    "interior: the mask makes the block": (
        "interior",
        "causal",
        [("tl.store(y_ptr + rows, total, mask=rows < n)", "tl.store(y_ptr, 1.0, mask=rows < n)")],
    ),
    "interior: a return in what would stand twice": (
        "interior",
        "flat",
        [("    entry =", "    if n < 0:\n        return\n    entry =")],
    ),
    "one-row: lanes are not consecutive": (
        "one-row",
        "flat",
        [("begin + tl.arange", "begin + 2 * tl.arange")],
    ),
    "one-row: rows of different lengths": (
        "one-row",
        "flat",
        [("% width", "% tl.load(index_ptr + at)"), ("// width", "// tl.load(index_ptr + at)")],
    ),
    "one-row: the quotient is spread over a tile": (
        "one-row",
        "flat",
        [("index_ptr + row,", "index_ptr + tl.sum(row[:, None], axis=1),")],
    ),
    "one-row: something is stored for each quotient": (
        "one-row",
        "flat",
        [("tl.store(y_ptr + at", "tl.store(y_ptr + row")],
    ),
    "one-row: a block of masks for one address": (
        "one-row",
        "flat",
        [("    index = tl.load(index_ptr + row, inside", "    index = tl.load(index_ptr + row, x > 0.0")],
    ),
    "spread: the program's number is used elsewhere": (
        "spread",
        "stripes",
        [("x * scale", "x * scale + start")],
    ),
    "spread: the number of programs is used elsewhere": (
        "spread",
        "stripes",
        [("x * scale", "x * scale + PROGRAMS")],
    ),
    "spread: one tile hands something to the next": (
        "spread",
        "stripes",
        [
            ("    start =", "    total = 0.0\n    start ="),
            ("x * scale", "x * scale + total"),
            ("        tl.store", "        total += 1.0\n        tl.store"),
        ],
    ),
    "spread: programs store once each": (
        "spread",
        "stripes",
        [("    start =", "    tl.store(y_ptr, scale)\n    start =")],
    ),
    "spread: a step that is no meta-parameter": (
        "spread",
        "stripes",
        [("PROGRAMS: tl.constexpr", "PROGRAMS")],
    ),
    "erf: of what may not be float32": (
        "erf",
        "flat",
        [("tl.load(x_ptr + at, inside).to(tl.float32)", "tl.load(x_ptr + at, inside)")],
    ),
    "sigmoid: of what may not be float32": (
        "sigmoid",
        "flat",
        [("inside, other=0.0).to(tl.float32)", "inside, other=0.0)")],
    ),
}
