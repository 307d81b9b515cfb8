"""Problems, measurements and decisions of a made-up kernel library, by number."""

from __future__ import annotations

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
from forecast_autotune.store.rows import Row

DEVICE = Device("Example GPU", "cuda", "90")


def problem(number: int) -> Problem:
    """One of endlessly many; eight of them are of one kernel."""
    kernel = Kernel(
        f"kernel_{number // 8}", source="def kernel(): ...\n" * 20, source_sha256=f"{number // 8:064x}"
    )
    argument = Argument("a", "tensor", "float16", (128 << (number % 8), 64), (64, 1), aligned=True)
    return Problem.of(kernel, [argument], DEVICE, key=[str(number % 8)], toolchain={"triton": "3.6.0"})


def measurement(of: Problem, number: int, at: str = "") -> Measurement:
    """A time of the candidate of this number."""
    candidate = Candidate(Config.of({"BLOCK": number}))
    ms = 0.1 + (number * 7919 % 1000) / 1000
    return Measurement(of.id, candidate, Outcome.OK, ms, repeats=20, protocol="example", at=at)


def decision(of: Problem, chosen: Measurement) -> Decision:
    """The decision for that candidate."""
    return Decision(
        *(of.id, chosen.candidate, Evidence.MEASURED, "example", 0.05, 0.02, 100, 10),
        median_ms=chosen.median_ms,
        at=chosen.at,
    )


def row(record: Problem | Measurement | Decision) -> Row:
    """The row of a record."""
    found = Row.of(record.to_json())
    assert found is not None
    return found
