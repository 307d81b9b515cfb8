"""A made-up table to try things on, and questions about it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from forecast_autotune.records import (
    Argument,
    Candidate,
    Config,
    Device,
    Kernel,
    Measurement,
    Outcome,
    Problem,
)
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.protocol import Query


def example_table(
    sizes: Sequence[int] = (16, 32, 64, 128, 256), warps: Sequence[int] = (2, 4, 8), *, seed: int = 0
) -> Table:
    """A small made-up problem with a smooth optimum and one corner that runs out of resources."""
    device = Device("example GPU", "cuda", "90", 132, 232448, 65536, 2048)
    arguments = (
        Argument("x", "tensor", "float16", (4096, 4096), (4096, 1), True),
        Argument("n", "scalar", "i32", value=4096),
    )
    problem = Problem.of(
        Kernel("example", source="def example(): ...", source_sha256="0" * 64),
        arguments,
        device,
        key=("4096",),
    )
    generator = np.random.default_rng(seed)
    rows = []
    for size in sizes:
        for w in warps:
            candidate = Candidate(Config.of({"BLOCK": size}, num_warps=w))
            if size == max(sizes) and w == max(warps):
                rows.append(Measurement(problem.id, candidate, Outcome.OUT_OF_RESOURCES, compile_s=0.5))
                continue
            log = (
                0.15 * (math.log2(size) - 6.4) ** 2
                + 0.1 * abs(math.log2(w) - 2)
                + 0.01 * generator.standard_normal()
            )
            ms = 2.0**log
            rows.append(
                Measurement(problem.id, candidate, Outcome.OK, ms, 0.99 * ms, 1.01 * ms, 20, 0.5, "example")
            )
    return Table(problem, rows)


def query_of(table: Table, known: int = 0) -> Query:
    """A query about a table's problem, with its first `known` rows as measurements."""
    return Query(
        table.problem,
        list(table.by_candidate()),
        table.grids(),
        table.measurements[:known],
        (),
        table.problem.ttir,
    )
