"""Problem packs: a kernel's computation, its sizes, and solutions."""

from __future__ import annotations

from forecast_harness.targets.packs.load import (
    builtin_names,
    load_pack,
    load_solution,
    make_solution,
)
from forecast_harness.targets.packs.schema import (
    AxisSpec,
    Definition,
    Language,
    Pack,
    PackFormat,
    Solution,
    TensorSpec,
    ToleranceSpec,
    Workload,
)

__all__ = [
    "AxisSpec",
    "Definition",
    "Language",
    "Pack",
    "PackFormat",
    "Solution",
    "TensorSpec",
    "ToleranceSpec",
    "Workload",
    "builtin_names",
    "load_pack",
    "load_solution",
    "make_solution",
]
