"""Sandboxes that trace: jobs in order, several at once, and an end that waits for none."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from forecast_harness.sandbox.api import JobStatus, ResourceLimits, SandboxError, SandboxJob
from forecast_harness.sandbox.cpu_lanes import CpuLanes
from forecast_harness.sandbox.lane_pools import lane_count

LIMITS = ResourceLimits(wall_s=60.0, trusted_s=60.0)
ENTRY = "tests.harness.trials.configs.tracing_job:main"


@pytest.fixture
def lanes() -> Iterator[CpuLanes]:
    made = CpuLanes(None, LIMITS, count=2)
    yield made
    made.close()


def jobs(*payloads: dict[str, float]) -> list[SandboxJob]:
    return [SandboxJob(ENTRY, p) for p in payloads]


def test_results_come_in_the_order_of_the_jobs(lanes: CpuLanes) -> None:
    found = lanes.run(jobs({"seconds": 0.5, "n": 1}, {"seconds": 0.0, "n": 2}, {"seconds": 0.0, "n": 3}))
    assert [(r.status, r.value) for r in found] == [(JobStatus.OK, n) for n in (1, 2, 3)]
    assert lanes.run([]) == []


def test_closing_ends_what_is_under_way(lanes: CpuLanes) -> None:
    said: list[str] = []

    def ask() -> None:
        try:
            lanes.run(jobs({"seconds": 50.0, "n": 1}, {"seconds": 50.0, "n": 2}, {"seconds": 50.0, "n": 3}))
        except SandboxError as error:
            said.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    while len(lanes._lanes._open) < 2:
        time.sleep(0.05)
    lanes.close()
    thread.join(40.0)
    assert not thread.is_alive(), "it was not waited for"
    assert len(said) == 1
    with pytest.raises(SandboxError, match="closed"):
        lanes.run(jobs({"seconds": 0.0, "n": 1}))


def test_there_is_a_lane_on_any_machine() -> None:
    assert 1 <= lane_count(8, 2) <= 8
    assert lane_count(8, 1 << 20) == 1
