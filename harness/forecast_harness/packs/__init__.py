"""Problem packs: what a kernel must compute, at which sizes, and solutions that do."""

from __future__ import annotations

from forecast_harness.packs.cases import from_case
from forecast_harness.packs.load import builtin_names, load, load_solution, solution_from, task_yml
from forecast_harness.packs.parts import Axis, Tensor, Tolerance
from forecast_harness.packs.schema import Definition, Format, Language, Pack, Solution, Workload

__all__ = [
    "Axis",
    "Definition",
    "Format",
    "Language",
    "Pack",
    "Solution",
    "Tensor",
    "Tolerance",
    "Workload",
    "builtin_names",
    "from_case",
    "load",
    "load_solution",
    "solution_from",
    "task_yml",
]
