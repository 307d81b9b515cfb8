"""Sandboxes that trace sources, several at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

from forecast_harness.sandbox.api import ResourceLimits, SandboxJob, SandboxLane
from forecast_harness.sandbox.jobs import JobResult, SandboxError
from forecast_harness.sandbox.lane_pools import close_lanes, end_pools

_MOST_LANES = 8
_PROCESSORS_PER_LANE = 2
"""Others compile and verify at the same time."""


def lane_count() -> int:
    """Lanes on this machine's processors; at least one."""
    return max(1, min(_MOST_LANES, len(os.sched_getaffinity(0)) // _PROCESSORS_PER_LANE))


class TracingLanes:
    """Lanes without a device that are opened when they are first needed, each by a thread of its own."""

    def __init__(self, folder: Path | None, limits: ResourceLimits, count: int = 0) -> None:
        """`folder` is for scratch files; `count`: lanes at most, 0 for what suits the machine."""
        self._folder, self._limits = folder, limits
        self._pool = ThreadPoolExecutor(count or lane_count(), "tracing")
        self._own = threading.local()
        self._open: list[SandboxLane] = []
        self._closed = False

    def run(self, jobs: Sequence[SandboxJob]) -> list[JobResult]:
        """Results of the jobs, in their order. Raises `SandboxError` where no lane can be opened, and after `close`."""
        try:
            return list(self._pool.map(self._run, jobs))
        except (CancelledError, RuntimeError) as error:
            if not self._closed:
                raise
            raise SandboxError("the tracing lanes are closed") from error

    def close(self) -> None:
        """End all lanes, and what they are at."""
        self._closed = True
        end_pools([self._pool], self._give_up)
        close_lanes(self._open)

    def _give_up(self) -> None:
        for lane in tuple(self._open):
            lane.give_up()

    def _run(self, job: SandboxJob) -> JobResult:
        lane: SandboxLane | None = getattr(self._own, "lane", None)
        if lane is None:
            lane = SandboxLane(scratch=self._folder, environment={"TRITON_INTERPRET": "0"})
            lane.__enter__()
            self._own.lane = lane
            self._open.append(lane)
        if self._closed:
            raise SandboxError("the tracing lanes are closed")
        return lane.run(job, self._limits)
