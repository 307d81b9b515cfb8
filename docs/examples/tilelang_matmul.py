"""Tune a kernel of another language: a TileLang matmul that is compiled to C and runs on this machine's cores.

Needs `pip install tilelang` and a C++ compiler, no GPU.

Output (numbers may differ):

    candidates: 18, measured: 8
    decided by: measured
    chosen: BLOCK_K=128 BLOCK_M=4 BLOCK_N=256
    a second time: stored, 0 measured
"""

import logging
import os
import tempfile

os.environ.setdefault("TILELANG_CACHE_DIR", tempfile.mkdtemp())  # read when TileLang is imported

import tilelang.language as T
import torch

from forecast_autotune import Settings, Space, Store
from forecast_autotune.languages import tune_language
from forecast_integrations.tilelang.kernel import TileLangKernel

M, N, K = 128, 256, 128
SPACE = Space({"BLOCK_M": [4, 8, 32], "BLOCK_N": [32, 128, 256], "BLOCK_K": [32, 128]})


def matmul(BLOCK_M: int, BLOCK_N: int, BLOCK_K: int):
    """C = A B, one tile of C at a time."""

    @T.prim_func
    def kernel(
        A: T.Tensor((M, K), "float32"), B: T.Tensor((K, N), "float32"), C: T.Tensor((M, N), "float32")
    ):
        with T.Kernel(N // BLOCK_N, M // BLOCK_M) as (column, row):
            total = T.alloc_local((BLOCK_M, BLOCK_N), "float32")
            T.clear(total)
            for block in T.serial(K // BLOCK_K):
                for i, k, j in T.grid(BLOCK_M, BLOCK_K, BLOCK_N):
                    total[i, j] += (
                        A[row * BLOCK_M + i, block * BLOCK_K + k]
                        * B[block * BLOCK_K + k, column * BLOCK_N + j]
                    )
            for i, j in T.grid(BLOCK_M, BLOCK_N):
                C[row * BLOCK_M + i, column * BLOCK_N + j] = total[i, j]

    return kernel


if __name__ == "__main__":
    logging.getLogger("tilelang").setLevel(logging.ERROR)
    a, b, c = torch.randn(M, K), torch.randn(K, N), torch.empty(M, N)
    kernel = TileLangKernel(matmul, {"a": a, "b": b, "c": c}, expected={"c": a @ b})
    store = Store(None)  # in memory; without it, the user's store
    tuned = tune_language(kernel, SPACE, store=store, settings=Settings())
    decision = tuned.decision
    print(f"candidates: {decision.candidates}, measured: {decision.measured}")
    print(f"decided by: {decision.evidence}")
    print("chosen:", " ".join(f"{name}={value}" for name, value in decision.chosen.config.kwargs))
    again = tune_language(kernel, SPACE, store=store, settings=Settings()).decision
    print(f"a second time: {again.evidence}, {again.measured} measured")

    tuned.compiled(a, b, c)  # what TileLang itself would give
    torch.testing.assert_close(c, a @ b, atol=1e-3, rtol=1e-3)
