"""Embedding lookup, forward: a tile of tokens by columns a program."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, integers, normal, unset

FAMILY, HAND = "indexing", "rows"


@triton.jit
def rows_embedding(
    table_ptr,
    table_stride,
    index_ptr,
    out_ptr,
    out_stride,
    n_tokens,
    n_cols,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    LOOP_COLS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    row_mask = rows < n_tokens
    index = tl.load(index_ptr + rows, mask=row_mask, other=0)[:, None]
    out_rows = out_ptr + rows.to(tl.int64)[:, None] * out_stride
    if LOOP_COLS:
        for i in range(0, n_cols, BLOCK_SIZE_N):
            cols = i + tl.arange(0, BLOCK_SIZE_N)[None, :]
            mask = row_mask[:, None] & (cols < n_cols)
            vector = tl.load(table_ptr + index * table_stride + cols, mask=mask, other=0.0)
            tl.store(out_rows + cols, vector, mask=mask)
    else:
        cols = tl.program_id(1) * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)[None, :]
        mask = row_mask[:, None] & (cols < n_cols)
        vector = tl.load(table_ptr + index * table_stride + cols, mask=mask, other=0.0)
        tl.store(out_rows + cols, vector, mask=mask)


SPACE: Space = {
    "kwargs": {
        "BLOCK_SIZE_M": [1, 4, 16, 64],
        "BLOCK_SIZE_N": [64, 256, 1024, 4096],
        "LOOP_COLS": [False, True],
    },
    "num_warps": [2, 4, 8],
    "num_stages": [1],
    "where": lambda c: 256 <= c["BLOCK_SIZE_M"] * c["BLOCK_SIZE_N"] <= 16384,
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    vocab, tokens, cols = tiny if small else shape
    table = normal((vocab, cols), device, dtype=torch.bfloat16, seed=1)
    index = integers(0, vocab, (tokens,), device, dtype=torch.int64, seed=2)
    out = unset((tokens, cols), device, dtype=torch.bfloat16)
    return {
        "args": (table, table.stride(0), index, out, out.stride(0), tokens, cols),
        "kwargs": {},
        "grid": lambda meta: (
            triton.cdiv(tokens, meta["BLOCK_SIZE_M"]),
            1 if meta["LOOP_COLS"] else triton.cdiv(cols, meta["BLOCK_SIZE_N"]),
        ),
        "outputs": (out,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    table, _, index = data["args"][:3]
    return (table[index].float(),)


CASES = [
    Case(
        name=f"rows_embedding/v{vocab}t{tokens}d{cols}",
        kernel=rows_embedding,
        key=("n_tokens", "n_cols"),
        space=SPACE,
        make=partial(_make, (vocab, tokens, cols), tiny),
        reference=_reference,
        tolerance=(1e-3, 1e-3),
    )
    for (vocab, tokens, cols), tiny in [
        ((128256, 8192, 4096), (40, 19, 300)),
        ((32000, 32768, 4096), (9, 2, 100)),
        ((50272, 16384, 768), (9, 2, 100)),
        ((30528, 65536, 1024), (9, 2, 100)),
        ((151936, 256, 3584), (9, 2, 100)),
        ((128256, 16, 8192), (9, 2, 100)),
        ((1000000, 131072, 128), (9, 2, 100)),
        ((65536, 262144, 64), (9, 2, 100)),
        ((32000, 1024, 2048), (9, 2, 100)),
    ]
]
