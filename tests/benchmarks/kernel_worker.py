"""Interprets the benchmark kernels in a process of its own; prints one JSON object per try.

Triton decides at import whether kernels are interpreted, so a test process cannot both do so and compile them.

    TRITON_INTERPRET=1 python kernel_worker.py [name ...]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from benchmarks.kernels import Case, cases, configs, launch, mismatch, reset

if TYPE_CHECKING:
    import triton


def picks(found: list[triton.Config], count: int, shift: int) -> list[triton.Config]:
    """Configs spread over the list, other ones for another shift."""
    # An odd step: spaces have even sides, and an even step would never vary warps and stages.
    step = (len(found) // count) | 1
    return [found[(shift * 7 + i * step) % len(found)] for i in range(count)]


def interpret(case: Case, shift: int) -> Iterator[dict[str, str]]:
    """Yield the faults in the results of some configs."""
    chosen = picks(configs(case), 3, shift)
    if case.wide is not None:
        chosen += picks(configs(case, wide=True), 2, shift)
    data = case.make("cpu", small=True)
    expected = case.reference(data)
    for config in chosen:
        reset(case, data)
        launch(case, data, config)
        yield {"case": case.name, "config": str(config), "error": mismatch(case, data, expected)}


if __name__ == "__main__":
    for number, one in enumerate(cases(sys.argv[1:] or None)):
        for result in interpret(one, number):
            print(json.dumps(result), flush=True)
