"""Whatever a candidate does to itself, its lane survives and the fault is the candidate's."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from forecast_harness.sandbox import lane as lanes
from forecast_harness.sandbox.api import (
    ContainmentLevel,
    Fault,
    JobStatus,
    SandboxError,
    SandboxLane,
    strongest_level,
)
from tests.harness.lanes import SMALL, judge, lane, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
HASTY = replace(SMALL, wall_s=0.7)
LOST_S = 10.0


@pytest.fixture(scope="module", params=["strongest", "weakest"])
def each(request: pytest.FixtureRequest) -> Iterator[SandboxLane]:
    with lane(strongest_level() if request.param == "strongest" else ContainmentLevel.PROCESS) as opened:
        yield opened


FAULTS = {
    "raises": (Fault.EXCEPTION, SMALL),
    "recurses": (Fault.EXCEPTION, SMALL),
    "says_exit": (Fault.EXCEPTION, SMALL),
    "crashes": (Fault.CRASH, SMALL),
    "aborts": (Fault.CRASH, SMALL),
    "leaves": (Fault.EXIT, SMALL),
    "leaves_as_if_done": (Fault.EXIT_UNFINISHED, SMALL),
    "kills_itself": (Fault.KILLED, SMALL),
    "hangs": (Fault.TIMEOUT, HASTY),
    "hangs_deaf": (Fault.TIMEOUT, HASTY),
    "stops_itself": (Fault.TIMEOUT, HASTY),
    "spins": (Fault.CPU_TIME, replace(SMALL, cpu_s=1)),
    "takes_memory": (Fault.MEMORY, SMALL),
    "takes_memory_in_parts": (Fault.MEMORY, SMALL),
}


@pytest.mark.parametrize("function", FAULTS)
def test_every_fault_has_its_name(each: SandboxLane, function: str) -> None:
    fault, limits = FAULTS[function]
    result = run(each, function, limits=limits)
    assert (result.fault, result.status) == (fault, fault.status)
    assert result.canary == "ok"
    assert result.detail
    assert each.healthy
    after = run(each, "honest")
    assert (after.status, after.value["returned"]) == (JobStatus.OK, 40)


@pytest.mark.parametrize("function", ["forks_without_end", "threads_without_end"])
def test_bombs_stay_small(each: SandboxLane, function: str) -> None:
    """Refused by the kernel beyond the limit, or noticed by the watchdog, as the level's table says."""
    result = run(each, function, limits=replace(SMALL, wall_s=8))
    if result.status is JobStatus.OK:
        assert result.value["returned"] < SMALL.processes
    else:
        assert (result.status, result.fault) == (JobStatus.CANDIDATE_ERROR, Fault.PROCESSES)
    assert run(each, "honest").status is JobStatus.OK


def test_the_disk_cannot_be_flooded(each: SandboxLane) -> None:
    result = run(each, "floods_disk")
    if result.status is JobStatus.OK:
        assert 1 << 20 <= result.value["returned"] <= SMALL.output_bytes
    else:
        assert (result.status, result.fault) == (JobStatus.CANDIDATE_ERROR, Fault.STORAGE)


def test_floods_of_output_neither_block_nor_fill_memory(each: SandboxLane) -> None:
    result = run(each, "floods_streams")
    assert (result.status, result.value["returned"]) == (JobStatus.OK, "wrote")


def test_what_the_candidate_raised_is_told_without_control_characters(each: SandboxLane) -> None:
    assert run(each, "raises").detail == "ValueError: no \ufffd[31m colour"


def test_faults_of_trusted_code_are_never_labels(each: SandboxLane) -> None:
    for name, text in (
        ("fails", "KeyError"),
        ("asks_nonsense", "JSON"),
        ("dies", "before it had answered"),
        ("returns_nonsense", "NaN"),
    ):
        result = judge(each, name)
        assert (result.status, result.fault) == (JobStatus.INFRA_ERROR, Fault.TRUSTED_ERROR), name
        assert text in result.detail
        assert not result.is_label


def test_trusted_code_that_sleeps_is_ended(each: SandboxLane) -> None:
    began = time.monotonic()
    result = judge(each, "sleeps", limits=replace(SMALL, trusted_s=0.5))
    assert (result.status, result.fault) == (JobStatus.INFRA_ERROR, Fault.TRUSTED_ERROR)
    assert "trusted_s=0.5" in result.detail
    assert time.monotonic() - began < LOST_S


def test_a_suspicion_is_quarantine(each: SandboxLane) -> None:
    result = judge(each, "suspects")
    assert (result.status, result.fault, result.is_label) == (JobStatus.SUSPICIOUS, Fault.REJECTED, False)
    assert result.detail == "it looked at us strangely"


def test_an_expected_fault_is_not_the_jobs(each: SandboxLane) -> None:
    result = judge(each, "recovers", "crashes")
    assert (result.status, result.value) == (JobStatus.OK, {"fault": "crash", "then": 40})


def test_cells_of_one_job_do_not_disturb_each_other(each: SandboxLane) -> None:
    result = judge(each, "twice")
    assert (result.status, result.value) == (JobStatus.OK, {"first": [40, 40, 40], "second": 40})


def test_cells_may_be_asked_from_several_threads(each: SandboxLane) -> None:
    result = judge(each, "at_once")
    assert result.status is JobStatus.OK, result.detail
    assert result.value == {"told": [[2 * n] * 4 for n in (1, 2, 3)], "late": "late"}


def test_a_thread_hears_of_its_own_cells_end(each: SandboxLane) -> None:
    result = judge(each, "dies_beside")
    assert (result.status, result.value) == (JobStatus.OK, {"fault": "crash", "values": [40] * 4})


def test_a_frozen_cell_uses_no_processor(each: SandboxLane) -> None:
    result = judge(each, "freezes", "watches_itself")
    assert result.status is JobStatus.OK, result.detail
    assert "thaw" in result.value["refused"]
    assert min(result.value["longest"]) >= 0.39


def test_arrays_cross_unchanged(each: SandboxLane) -> None:
    result = judge(each, "echo")
    assert result.status is JobStatus.OK
    assert result.value == {"same": True, "count": 2, "said": "ä"}
    assert result.arrays["big"].data == bytes(range(256)) * (1 << 12)
    assert result.arrays["none"].shape == (0, 3)


def test_an_answer_beyond_the_limit_is_no_attack(each: SandboxLane) -> None:
    result = judge(each, "much")
    assert (result.status, result.fault) == (JobStatus.CANDIDATE_ERROR, Fault.EXCEPTION)
    assert f"{SMALL.answer_bytes + 1} bytes" in result.detail


def test_a_cell_cannot_foresee_what_the_judge_draws() -> None:
    with lane(warm=("torch",)) as opened:
        drawn = [judge(opened, "seeds").value for _ in range(2)]
    for name in ("python", "numpy", "torch"):
        assert len({d[whose][name] for d in drawn for whose in ("ours", "theirs")} - {None}) >= 3, name
        assert drawn[0]["ours"][name] not in (drawn[0]["theirs"][name], drawn[1]["ours"][name])


def _in_a_row(opened: SandboxLane, poisons: int, hangs: int) -> None:
    kinds = ["crashes", "aborts", "raises", "leaves", "takes_memory"]
    longest = 0.0
    for i in range(poisons):
        kind = kinds[i % len(kinds)]
        result = run(opened, kind)
        assert (result.fault, result.is_label) == (FAULTS[kind][0], True), result
        longest = max(longest, result.seconds)
    for i in range(hangs):
        kind = ("hangs", "hangs_deaf", "stops_itself")[i % 3]
        result = run(opened, kind, limits=replace(SMALL, wall_s=0.3))
        assert (result.fault, result.is_label) == (Fault.TIMEOUT, True), result
        longest = max(longest, result.seconds)
    assert longest < LOST_S
    assert opened.restarts == 0
    assert run(opened, "honest").status is JobStatus.OK


@pytest.mark.slow
def test_a_hundred_poisons_and_twenty_hangs_in_a_row() -> None:
    with lane(warm=("torch", "triton")) as opened:
        _in_a_row(opened, 100, 20)


def test_a_server_that_is_long_in_starting_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when many lanes open at once: it greets when it is ready, and is silent no more."""
    monkeypatch.setattr(lanes, "_SILENT_S", 2)
    with lane(warm=("torch", "triton", "tests.harness.slow_start")) as opened:
        assert run(opened, "honest").status is JobStatus.OK
        assert opened.restarts == 0


def test_an_unfit_device_makes_no_labels() -> None:
    """A device that is not there stands for one that is broken: the canary cannot sing."""
    with lane(strongest_level(), device="63", warm=("torch",)) as opened:
        assert not opened.healthy
        result = run(opened, "crashes")
    assert (result.status, result.fault) == (JobStatus.INFRA_ERROR, Fault.DEVICE_UNHEALTHY)
    assert result.canary not in ("", "ok")


def test_a_lane_that_is_not_open_says_so() -> None:
    closed = SandboxLane()
    with pytest.raises(SandboxError, match="with SandboxLane"):
        _ = closed.level
