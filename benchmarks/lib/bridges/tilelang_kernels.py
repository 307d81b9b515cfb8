"""Kernels in TileLang, plain: what each computes at one shape, and the configs that its author would try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tilelang.language as T  # type: ignore[import-not-found]
import torch

from forecast_autotune import Space

ROWS, COLUMNS = 8192, 4096
SIZE = 4096
"""Rows, columns and inner length of a matrix product."""


def add(ROWS_OF_TILE: int, COLUMNS_OF_TILE: int, THREADS: int) -> Any:
    @T.prim_func
    def kernel(
        X: T.Tensor((ROWS, COLUMNS), "float16"),
        Y: T.Tensor((ROWS, COLUMNS), "float16"),
        OUT: T.Tensor((ROWS, COLUMNS), "float16"),
    ):
        with T.Kernel(COLUMNS // COLUMNS_OF_TILE, ROWS // ROWS_OF_TILE, threads=THREADS) as (column, row):
            for i, j in T.Parallel(ROWS_OF_TILE, COLUMNS_OF_TILE):
                OUT[row * ROWS_OF_TILE + i, column * COLUMNS_OF_TILE + j] = (
                    X[row * ROWS_OF_TILE + i, column * COLUMNS_OF_TILE + j]
                    + Y[row * ROWS_OF_TILE + i, column * COLUMNS_OF_TILE + j]
                )

    return kernel


def softmax(ROWS_OF_TILE: int, THREADS: int) -> Any:
    @T.prim_func
    def kernel(X: T.Tensor((ROWS, COLUMNS), "float16"), OUT: T.Tensor((ROWS, COLUMNS), "float16")):
        with T.Kernel(ROWS // ROWS_OF_TILE, threads=THREADS) as row:
            x = T.alloc_fragment((ROWS_OF_TILE, COLUMNS), "float32")
            top = T.alloc_fragment((ROWS_OF_TILE,), "float32")
            total = T.alloc_fragment((ROWS_OF_TILE,), "float32")
            T.copy(X[row * ROWS_OF_TILE, 0], x)
            T.reduce_max(x, top, dim=1)
            for i, j in T.Parallel(ROWS_OF_TILE, COLUMNS):
                x[i, j] = T.exp(x[i, j] - top[i])
            T.reduce_sum(x, total, dim=1)
            for i, j in T.Parallel(ROWS_OF_TILE, COLUMNS):
                x[i, j] = x[i, j] / total[i]
            T.copy(x, OUT[row * ROWS_OF_TILE, 0])

    return kernel


def row_sums(ROWS_OF_TILE: int, COLUMNS_OF_TILE: int, THREADS: int) -> Any:
    @T.prim_func
    def kernel(X: T.Tensor((ROWS, COLUMNS), "float16"), OUT: T.Tensor((ROWS,), "float32")):
        with T.Kernel(ROWS // ROWS_OF_TILE, threads=THREADS) as row:
            x = T.alloc_fragment((ROWS_OF_TILE, COLUMNS_OF_TILE), "float32")
            sums = T.alloc_fragment((ROWS_OF_TILE, COLUMNS_OF_TILE), "float32")
            total = T.alloc_fragment((ROWS_OF_TILE,), "float32")
            T.clear(sums)
            for step in T.serial(COLUMNS // COLUMNS_OF_TILE):
                T.copy(X[row * ROWS_OF_TILE, step * COLUMNS_OF_TILE], x)
                for i, j in T.Parallel(ROWS_OF_TILE, COLUMNS_OF_TILE):
                    sums[i, j] += x[i, j]
            T.reduce_sum(sums, total, dim=1)
            T.copy(total, OUT[row * ROWS_OF_TILE])

    return kernel


def matvec(ROWS_OF_TILE: int, COLUMNS_OF_TILE: int, THREADS: int) -> Any:
    @T.prim_func
    def kernel(
        A: T.Tensor((ROWS, COLUMNS), "float16"),
        X: T.Tensor((COLUMNS,), "float16"),
        OUT: T.Tensor((ROWS,), "float32"),
    ):
        with T.Kernel(ROWS // ROWS_OF_TILE, threads=THREADS) as row:
            a = T.alloc_fragment((ROWS_OF_TILE, COLUMNS_OF_TILE), "float16")
            x = T.alloc_shared((COLUMNS_OF_TILE,), "float16")
            sums = T.alloc_fragment((ROWS_OF_TILE, COLUMNS_OF_TILE), "float32")
            total = T.alloc_fragment((ROWS_OF_TILE,), "float32")
            T.clear(sums)
            for step in T.serial(COLUMNS // COLUMNS_OF_TILE):
                T.copy(X[step * COLUMNS_OF_TILE], x)
                T.copy(A[row * ROWS_OF_TILE, step * COLUMNS_OF_TILE], a)
                for i, j in T.Parallel(ROWS_OF_TILE, COLUMNS_OF_TILE):
                    sums[i, j] += T.cast(a[i, j], "float32") * T.cast(x[j], "float32")
            T.reduce_sum(sums, total, dim=1)
            T.copy(total, OUT[row * ROWS_OF_TILE])

    return kernel


def matmul(BLOCK_M: int, BLOCK_N: int, BLOCK_K: int, STAGES: int, THREADS: int) -> Any:
    @T.prim_func
    def kernel(
        A: T.Tensor((SIZE, SIZE), "float16"),
        B: T.Tensor((SIZE, SIZE), "float16"),
        OUT: T.Tensor((SIZE, SIZE), "float16"),
    ):
        with T.Kernel(SIZE // BLOCK_N, SIZE // BLOCK_M, threads=THREADS) as (column, row):
            a = T.alloc_shared((BLOCK_M, BLOCK_K), "float16")
            b = T.alloc_shared((BLOCK_K, BLOCK_N), "float16")
            total = T.alloc_fragment((BLOCK_M, BLOCK_N), "float32")
            T.clear(total)
            for step in T.Pipelined(SIZE // BLOCK_K, num_stages=STAGES):
                T.copy(A[row * BLOCK_M, step * BLOCK_K], a)
                T.copy(B[step * BLOCK_K, column * BLOCK_N], b)
                T.gemm(a, b, total)
            T.copy(total, OUT[row * BLOCK_M, column * BLOCK_N])

    return kernel


@dataclass(frozen=True)
class Example:
    """One kernel at one shape."""

    build: Callable[..., Any]
    space: Space
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of its inputs, in float16."""
    out: tuple[tuple[int, ...], torch.dtype]
    reference: Callable[..., torch.Tensor]

    def tensors(self, device: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Arguments of a launch by name, and what the output should hold."""
        inputs = [torch.randn(shape, device=device, dtype=torch.float16) for shape in self.shapes]
        named = dict(zip("xyz", inputs, strict=False))
        shape, dtype = self.out
        out = torch.empty(shape, device=device, dtype=dtype)
        return {**named, "out": out}, {"out": self.reference(*inputs).to(dtype)}


_TILES = {"COLUMNS_OF_TILE": [256, 512, 1024, 2048], "THREADS": [128, 256]}
_WHOLE, _ROWS = (ROWS, COLUMNS), ((ROWS,), torch.float32)
EXAMPLES = {
    "add": Example(
        add,
        Space({"ROWS_OF_TILE": [1, 4, 16, 32], **_TILES}),
        (_WHOLE, _WHOLE),
        (_WHOLE, torch.float16),
        torch.add,
    ),
    "softmax": Example(
        softmax,
        Space({"ROWS_OF_TILE": [1, 2, 4, 8], "THREADS": [64, 128, 256, 512]}),
        (_WHOLE,),
        (_WHOLE, torch.float16),
        lambda x: torch.softmax(x.float(), 1),
    ),
    "row_sums": Example(
        row_sums,
        Space({"ROWS_OF_TILE": [1, 2, 4, 8, 16], **_TILES}),
        (_WHOLE,),
        _ROWS,
        lambda x: x.float().sum(1),
    ),
    "matvec": Example(
        matvec,
        Space({"ROWS_OF_TILE": [2, 4, 8, 16], **_TILES}),
        (_WHOLE, (COLUMNS,)),
        _ROWS,
        lambda a, x: a.float() @ x.float(),
    ),
    "matmul": Example(
        matmul,
        Space(
            {
                "BLOCK_M": [64, 128],
                "BLOCK_N": [64, 128, 256],
                "BLOCK_K": [32, 64],
                "STAGES": [2, 3, 4],
                "THREADS": [128, 256],
            }
        ),
        ((SIZE, SIZE), (SIZE, SIZE)),
        ((SIZE, SIZE), torch.float16),
        torch.matmul,
    ),
}
