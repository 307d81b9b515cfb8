"""Sandboxes without a device for short jobs, several at a time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

from forecast_harness.sandbox.api import ResourceLimits, SandboxJob, SandboxLane
from forecast_harness.sandbox.jobs import JobResult, SandboxError
from forecast_harness.sandbox.lane_pools import LanePool, end_pools, lane_count

_MOST_LANES = 8
_PROCESSORS_PER_LANE = 2
"""Others compile and verify at the same time."""


class CpuLanes:
    """Lanes without a device. Any thread may ask."""

    def __init__(
        self,
        folder: Path | None,
        limits: ResourceLimits,
        count: int = 0,
        *,
        warm: Sequence[str] = ("torch", "triton"),
    ) -> None:
        """`folder` is for scratch files; `count`: lanes at most, 0 for what suits the machine; `warm`: see
        `SandboxLane`."""
        most = count or lane_count(_MOST_LANES, _PROCESSORS_PER_LANE)
        self._limits, self._closed = limits, False
        self._pool = ThreadPoolExecutor(most, "cpu-lanes")
        self._lanes = LanePool(
            lambda: SandboxLane(scratch=folder, environment={"TRITON_INTERPRET": "0"}, warm=warm), most
        )

    def open_ahead(self) -> None:
        """Begin to open the first lane: who asks next waits less."""
        self._lanes.open_ahead(1)

    def run(self, jobs: Sequence[SandboxJob]) -> list[JobResult]:
        """Results of the jobs, in their order. Raises `SandboxError` where no lane can be opened, and after `close`."""
        try:
            return list(self._pool.map(self._run, jobs))
        except (CancelledError, RuntimeError) as error:
            if not self._closed:
                raise
            raise SandboxError("the lanes are closed") from error

    def close(self) -> None:
        """End all lanes, and what they are at."""
        self._closed = True
        end_pools([self._pool], self._lanes.give_up)
        self._lanes.close()

    def _run(self, job: SandboxJob) -> JobResult:
        with self._lanes.borrowed() as lane:
            if self._closed:
                raise SandboxError("the lanes are closed")
            return lane.run(job, self._limits)
