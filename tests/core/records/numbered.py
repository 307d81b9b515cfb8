"""Problems told apart by name and measurements told apart by number: little to write, easy to account for.

Imported by the processes that `test_store_torture.py` starts as well, so that all mean the same records.
"""

from __future__ import annotations

from forecast_autotune.records import (
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


def problem(name: str = "k") -> Problem:
    return Problem.of(
        Kernel(name, source="pass", source_sha256="00"), [], Device("Test Device", "cuda", "90")
    )


def measurement(p: Problem, number: int, by: int = 0) -> Measurement:
    return Measurement(p.id, Candidate(Config.of({"N": number, "BY": by})), Outcome.OK, 1.0 + number)


def decision(p: Problem) -> Decision:
    return Decision(p.id, measurement(p, 0).candidate, Evidence.MEASURED, "r", 0.1, 0.02, 3, 3)
