"""A program that uses public kernel libraries: operations run once each, and how many keys their tuners decide."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any


def first_pass_of_libraries(only: Sequence[str]) -> dict[str, Any]:
    """Run the operations whose names begin so: `keys` of all tuners, and the names of those that `failed`.

    A failing operation costs itself alone, and is told.
    """
    import torch

    from benchmarks.lib.libraries.workloads import workloads
    from benchmarks.lib.result_files import say
    from forecast_autotune.records import Decision
    from forecast_integrations.triton.publication import LISTENERS

    problems: set[str] = set()

    def hear(name: str, decision: Decision) -> None:
        problems.add(decision.problem)

    LISTENERS.append(hear)
    failed = []
    for name, work in workloads(only).items():
        torch.manual_seed(0)
        try:
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception:
            failed.append(name)
            say(f"FAILED {name}: {traceback.format_exc(limit=-3)[-1200:]}")
    LISTENERS.remove(hear)
    return {"keys": len(problems), "failed": failed}
