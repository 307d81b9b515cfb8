"""Runs variants beside their base kernel in Triton's interpreter; prints one JSON object per variant.

TRITON_INTERPRET=1 python mechanical_worker.py < variants.json
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from forecast_autotune.variants import Variant
from forecast_autotune.variants.entry import KernelEntry
from forecast_integrations.triton.variants.loading import import_text

Call = tuple[dict[str, Any], Callable[[dict[str, Any]], tuple[int, ...]], dict[str, Any], list[str]]
"""Arguments by name, grid of the parameters, meta-parameters, names of what is written."""


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32).to(dtype)


def softmax(rng: random.Random) -> Call:
    rows, cols, block = rng.randint(1, 5), rng.choice([1, 15, 16, 17, 40, 64]), rng.choice([16, 64])
    x = normal(rows, cols)
    given = {"y_ptr": torch.full_like(x, 77.0), "x_ptr": x, "stride": cols, "n_cols": cols}
    return given, lambda _: (rows,), {"BLOCK": block}, ["y_ptr"]


def matmul(rng: random.Random) -> Call:
    # Multiples of 8, as a copy engine needs them; ragged against the tiles.
    m, n, k = (8 * rng.randint(1, most) for most in (4, 4, 6))
    a, b, c = normal(m, k, dtype=torch.float16), normal(k, n, dtype=torch.float16), torch.full((m, n), 77.0)
    strides = {
        f"stride_{name}": stride
        for pair, tensor in (("am ak", a), ("bk bn", b), ("cm cn", c))
        for name, stride in zip(pair.split(), tensor.stride(), strict=True)
    }
    given = {"a_ptr": a, "b_ptr": b, "c_ptr": c, "M": m, "N": n, "K": k, **strides}
    meta = {"BLOCK_M": 16, "BLOCK_N": rng.choice([16, 32]), "BLOCK_K": 16}
    return given, lambda p: (cdiv(m, p["BLOCK_M"]) * cdiv(n, p["BLOCK_N"]),), meta, ["c_ptr"]


def rows(rng: random.Random) -> Call:
    n_rows, n_cols = rng.randint(1, 7), rng.choice([1, 5, 16, 31])
    x = normal(n_rows, n_cols)
    given = {"x_ptr": x, "w_ptr": normal(n_cols), "y_ptr": torch.full_like(x, 77.0)}
    given |= {"n_rows": n_rows, "n_cols": n_cols}
    return (
        given,
        lambda p: (cdiv(n_rows, p["PER"]) + 1,),
        {"BLOCK": 32, "PER": rng.choice([1, 2, 3])},
        ["y_ptr"],
    )


def tiles(rng: random.Random) -> Call:
    m, n = rng.randint(1, 40), rng.randint(1, 40)
    x = normal(m, n)
    given = {"x_ptr": x, "w_ptr": normal(n), "y_ptr": torch.full_like(x, 77.0), "M": m, "N": n}
    meta = {"BLOCK_M": 8, "BLOCK_N": 16}
    return given, lambda p: (cdiv(m, p["BLOCK_M"]), cdiv(n, p["BLOCK_N"])), meta, ["y_ptr"]


def causal(rng: random.Random) -> Call:
    n = rng.choice([1, 16, 40, 64])
    given = {"x_ptr": normal(n), "y_ptr": torch.full((n,), 77.0), "n": n}
    return given, lambda p: (cdiv(n, p["BLOCK"]),), {"BLOCK": 16}, ["y_ptr"]


def strided(rng: random.Random) -> Call:
    n, parts = rng.choice([1, 16, 40, 64, 100]), rng.choice([1, 3])
    given = {"x_ptr": normal(n), "scale_ptr": normal(parts), "y_ptr": torch.full((parts,), 77.0), "n": n}
    return given, lambda p: (p["PARTS"],), {"BLOCK": 16, "PARTS": parts}, ["y_ptr"]


def flat(rng: random.Random) -> Call:
    # Rows that blocks fit, that they do not, and a last block that is not full.
    width, rows_, height = rng.choice([16, 24, 32, 7]), rng.randint(1, 6), rng.randint(1, 3)
    n = width * rows_ - rng.choice([0, 3])
    index = torch.tensor([rng.randrange(5) for _ in range(rows_)], dtype=torch.int64)
    given = {"x_ptr": normal(n), "table_ptr": normal(5, width), "index_ptr": index}
    given |= {"w_ptr": normal(height, width), "y_ptr": torch.full((n,), 77.0)}
    given |= {"n": n, "width": width, "height": height}
    return given, lambda p: (cdiv(n, p["BLOCK"]),), {"BLOCK": rng.choice([8, 16])}, ["y_ptr"]


def moments(rng: random.Random) -> Call:
    n, sides = rng.choice([1, 30, 64, 200]), rng.choice([1, 2])
    given = {"x_ptr": normal(sides * 3, n), "y_ptr": torch.full((sides * 3,), 77.0, dtype=torch.float16)}
    return {**given, "n": n, "scale": 0.5}, lambda p: (3, sides), {"BLOCK": 16}, ["y_ptr"]


CALLS = {
    "moments": moments,
    "softmax": softmax,
    "matmul": matmul,
    "rows": rows,
    "tiles": tiles,
    "causal": causal,
    "strided": strided,
    "flat": flat,
}


def outputs(entry: KernelEntry, call: Call) -> dict[str, torch.Tensor]:
    given, grid, meta, written = call
    copied = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in given.items()}
    options = {} if "num_warps" not in entry.meta else {"num_warps": 4}
    entry.run(grid, {**copied, **meta, **options}, {**meta, **options}, {})
    return {name: copied[name] for name in written}


def compare(name: str, variant: Variant, calls: list[Call], expected: list[dict[str, torch.Tensor]]) -> str:
    entry = KernelEntry.of(import_text(variant.source), variant.kernel)
    for call, wanted in zip(calls, expected, strict=True):
        got = outputs(entry, call)
        for output, want in wanted.items():
            exact = not variant.extra["approximate"]
            within = 0.0 if exact else 1e-3 if want.dtype == torch.float16 else 1e-4
            if not torch.allclose(got[output], want, rtol=within, atol=within):
                worst = (got[output] - want).abs().max().item()
                sizes = {n: v for n, v in call[0].items() if isinstance(v, int)}
                return f"{output} of {name} differs by {worst:g} at {sizes} {call[2]}"
    return ""


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name, (source, kernel, listed) in json.load(sys.stdin).items():
        chance = random.Random(name)
        tried = [CALLS[name.removesuffix(" again")](chance) for _ in range(3)]
        original = KernelEntry.of(import_text(source), kernel)
        known = [outputs(original, call) for call in tried]
        for data in listed:
            one = Variant.from_json(data)
            try:
                said = compare(name, one, tried, known)
            except Exception as error:
                said = f"{type(error).__name__}: {error}; {error.__cause__}"
            print(json.dumps({"kernel": name, "variant": one.name, "error": said}), flush=True)
