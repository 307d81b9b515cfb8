"""Kernels and helpers of the tests on the null device. Kernels are tiny: each config compiles in 50 ms."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from forecast_autotune.records import Candidate
from forecast_autotune.records.table import Table
from forecast_autotune.store import Store
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.problem.describe import configs_by_candidate


@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    """out = 2 x; some blocks do not compile."""
    tl.static_assert(BLOCK != 64, "sixty-four is refused")
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def twice(x, out, n, BLOCK: tl.constexpr):
    """Another source of `double`."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    tl.store(out + i, value + value, mask=i < n)


@triton.jit
def total(x, out, n, BLOCK: tl.constexpr):
    """Sums over more than one warp need shared memory: 4 bytes per warp."""
    i = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(x + i, mask=i < n), axis=0))


def fresh(kernel: Any) -> Any:
    """The kernel without anything compiled, as a new process would see it."""
    return triton.jit(kernel.fn)


def by_launch_options(metadata: Any) -> float:
    """Milliseconds of a launch: the least for 4 warps and 3 stages."""
    warps, stages = metadata.num_warps, metadata.num_stages
    faster = 0.5 if metadata.name == "twice" else 1.0
    return float(faster * (1.0 + 0.5 * abs(warps.bit_length() - 3) + 0.25 * abs(stages - 3)))


def configs(warps: Sequence[int] = (1, 2, 4, 8), stages: Sequence[int] = (1, 2, 3, 4, 5, 6)) -> list[Any]:
    """Configs that differ in launch options alone."""
    return [
        triton.Config({"BLOCK": 128}, num_warps=w, num_stages=s) for w, s in itertools.product(warps, stages)
    ]


def blocks(*sizes: int, **options: Any) -> list[Any]:
    """One config per BLOCK."""
    return [triton.Config({"BLOCK": size}, **options) for size in sizes]


def launch(tuner: Any, n: int = 4096) -> Any:
    """Call a tuned kernel of this module for `n` elements."""
    x = torch.empty(n)
    return tuner[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, x, n)


def kernel_call(tuner: Any, *args: Any, grid: Any = None, **named: Any) -> tuple[KernelCall, list[Candidate]]:
    """A call of a tuned kernel for 4096 elements unless told otherwise, and its candidates."""
    grid = grid or (lambda meta: (triton.cdiv(4096, meta["BLOCK"]),))
    found = configs_by_candidate(tuner.configs)
    return KernelCall(tuner, args, {"grid": grid, "warmup": False, **named}, found), list(found)


def binaries() -> int:
    """How many kernels were compiled into Triton's cache."""
    return len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")))


def tables(root: Path) -> list[Table]:
    """What a store on disk holds, read as another process would."""
    return list(Store(root).tables())


def counts(table: Table) -> Counter[tuple[Candidate, str]]:
    """How often each candidate was measured, by protocol."""
    return Counter((m.candidate, m.protocol) for m in table.measurements)


def child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process; returns its pid at once. It exits with 0, or 1 if it raised."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)
