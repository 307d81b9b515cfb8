"""A cell that a job has left under a name is there for a later job, and for nobody else."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from forecast_harness.sandbox.api import (
    ContainmentLevel,
    Fault,
    JobResult,
    ResourceLimits,
    SandboxJob,
    SandboxLane,
    strongest_level,
)
from forecast_harness.sandbox.containment import linux
from tests.harness.lanes import FILES, SMALL, lane, run
from tests.waiting import is_running, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
FIRST, AGAIN = {"count": 1, "old": False}, {"count": 2, "old": True}


@pytest.fixture
def opened() -> Iterator[SandboxLane]:
    if strongest_level() < ContainmentLevel.NAMESPACES:
        pytest.skip("only cells with a root of their own outlive their job's files")
    with lane() as one:
        yield one


def left(opened: SandboxLane, name: str, limits: ResourceLimits = SMALL, **told: Any) -> JobResult:
    return opened.run(SandboxJob("tests.harness.judges:leaves", {"name": name, **told}, FILES), limits)


def test_a_later_job_that_asks_for_its_name_has_it_and_others_have_their_own(opened: SandboxLane) -> None:
    assert left(opened, "base").value == FIRST
    assert run(opened, "honest").fault is Fault.NONE
    assert left(opened, "base").value == AGAIN
    assert left(opened, "other").value == FIRST
    assert left(opened, "base").value == FIRST, "one is left at a time"


@pytest.mark.parametrize("told", [{"rests": False}, {"dies": True}])
def test_what_was_not_left_ends_with_its_job(opened: SandboxLane, told: dict[str, Any]) -> None:
    left(opened, "base", **told)
    assert linux.children(opened.server_pid) == []
    assert left(opened, "base").value == FIRST


def test_a_cell_that_ends_while_it_rests_is_missed_by_nobody(opened: SandboxLane) -> None:
    assert left(opened, "base").value == FIRST
    (keeper,) = linux.children(opened.server_pid)
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: not is_running(keeper))
    assert run(opened, "honest").fault is Fault.NONE
    assert left(opened, "base").value == FIRST


def test_its_time_is_limited_and_it_ends_with_the_lane(opened: SandboxLane) -> None:
    hasty = ResourceLimits(wall_s=1.0)
    assert left(opened, "base", hasty).value == FIRST
    (keeper,) = linux.children(opened.server_pid)
    wait_until(lambda: not is_running(keeper))
    assert left(opened, "base").value == FIRST
    (keeper,) = linux.children(opened.server_pid)
    opened.close()
    wait_until(lambda: not is_running(keeper))


def test_where_files_go_with_the_job_so_do_its_cells() -> None:
    with lane(ContainmentLevel.PROCESS) as opened:
        assert [left(opened, "base").value for _ in range(2)] == [FIRST, FIRST]
