"""Lanes for the sandbox's tests, and shorthands for what is asked of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forecast_harness.sandbox.api import ContainmentLevel, JobResult, ResourceLimits, SandboxJob, SandboxLane

ROOT = Path(__file__).parents[2]
FILES = {"attacks.py": Path(__file__).with_name("attacks.py").read_text()}
RUN = "tests.harness.judges:run_file"
SMALL = ResourceLimits(
    wall_s=20,
    cpu_s=20,
    memory_bytes=256 << 20,
    processes=40,
    output_bytes=8 << 20,
    answer_bytes=8 << 20,
    trusted_s=30,
)


@contextmanager
def lane(level: ContainmentLevel | None = None, **options: Any) -> Iterator[SandboxLane]:
    """A lane whose trusted entries may lie in this folder; without torch unless it is asked for."""
    before = list(sys.path)
    sys.path.insert(0, str(ROOT))
    try:
        warm = (*options.pop("warm", ()), "tests.harness.judges")
        with SandboxLane(level, warm=warm, **options) as opened:
            yield opened
    finally:
        sys.path[:] = before


def run(
    lane: SandboxLane, function: str, *arguments: Any, limits: ResourceLimits = SMALL, entry: str = RUN
) -> JobResult:
    """Have the candidate's `function` called in a cell."""
    payload = {"file": "attacks.py", "function": function, "arguments": list(arguments)}
    return lane.run(SandboxJob(entry, payload, FILES), limits)


def judge(
    lane: SandboxLane, name: str, function: str = "honest", limits: ResourceLimits = SMALL
) -> JobResult:
    """Let an entry of `judges.py` judge it."""
    payload = {"file": "attacks.py", "function": function}
    return lane.run(SandboxJob(f"tests.harness.judges:{name}", payload, FILES), limits)
