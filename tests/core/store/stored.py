"""What the tests put into stores: problems that differ in size, kernel or device, and facts about them."""

from __future__ import annotations

from pathlib import Path

from forecast_autotune.records import (
    Argument,
    Candidate,
    Config,
    Decision,
    Device,
    Evidence,
    Kernel,
    Measurement,
    Outcome,
    Problem,
)
from forecast_autotune.store.merging import RowSource
from forecast_autotune.store.rows import DECISION, MEASUREMENT

H200 = Device("NVIDIA H200", "cuda", "90")
A100 = Device("NVIDIA A100-SXM4-80GB", "cuda", "80")


def problem(
    size: int = 1024,
    *,
    kernel: str = "matmul",
    source: str = "aa",
    device: Device = H200,
    dtype: str = "float16",
) -> Problem:
    arguments = [
        Argument("a", "tensor", dtype, (size, 64), (64, 1), aligned=True),
        Argument("M", "scalar", "i32", value=size),
        Argument("ACT", "constexpr", value="relu"),
    ]
    return Problem.of(Kernel(kernel, source="pass", source_sha256=source), arguments, device, key=[str(size)])


def measured(p: Problem, block: int, ms: float | None = 1.0, at: str = "") -> Measurement:
    candidate = Candidate(Config.of({"BLOCK": block}))
    if ms is None:
        return Measurement(p.id, candidate, Outcome.COMPILE_ERROR, at=at, extra={"message": "no"})
    return Measurement(p.id, candidate, Outcome.OK, ms, at=at, extra={"registers": 128})


def decided(p: Problem, block: int = 16) -> Decision:
    return Decision(p.id, measured(p, block).candidate, Evidence.MEASURED, "fastest", 0.05, 0.02, 10, 4)


def log_of(root: Path) -> Path:
    """The only log of a store on disk."""
    (log,) = root.glob("v1/*/*/log-*.jsonl")
    return log


def row_digests(source: RowSource) -> frozenset[str]:
    """Names of all measurements and decisions: equal for stores that hold the same."""
    return frozenset(
        row.digest
        for kernel in source.kernels()
        for row in source.rows(kernel)
        if row.kind in (MEASUREMENT, DECISION)
    )
