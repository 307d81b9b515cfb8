"""Changes to the kernels after which a rewrite must not apply any more, each with the reason."""

from __future__ import annotations

_LOOP = "m = tl.maximum(m, tl.max(x, axis=0))"
_SUM = "total += tl.sum(tl.exp(x - m), axis=0)"
_UPDATE = "tl.store(x_ptr + cols, x, mask=cols < n_cols)"
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
    "exp2: the type does not show": ("exp2", "softmax", [_FLOAT]),
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
