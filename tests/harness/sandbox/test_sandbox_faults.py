"""Whatever a candidate does to itself, its lane survives and the fault is the candidate's."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forecast_harness.sandbox import lane as lanes
from forecast_harness.sandbox import process_stops
from forecast_harness.sandbox.api import (
    ContainmentLevel,
    Fault,
    JobResult,
    JobStatus,
    ResourceLimits,
    SandboxError,
    SandboxJob,
    SandboxLane,
    strongest_level,
)
from forecast_harness.sandbox.cell import CandidateFault, Cell, ServerConnection
from forecast_harness.sandbox.containment import linux
from forecast_harness.sandbox.process_stops import CHECK, STOP, ProcessStopper
from tests.harness.lanes import RUN, SMALL, judge, lane, run

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


@pytest.mark.sampled(12)
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


@pytest.mark.parametrize(
    ("entry", "function", "value"),
    [
        ("at_once", "honest", {"told": [[2 * n] * 4 for n in (1, 2, 3)], "late": "late"}),
        ("dies_beside", "honest", {"fault": "crash", "values": [40] * 4}),
    ],
)
def test_cells_of_one_job_do_not_disturb_each_other(
    each: SandboxLane, entry: str, function: str, value: dict[str, object]
) -> None:
    """A fault that is expected is not the job's, and a thread hears of its own cells' end."""
    result = judge(each, entry, function)
    assert (result.status, result.value) == (JobStatus.OK, value), result.detail


def test_a_frozen_cell_uses_no_processor(each: SandboxLane) -> None:
    result = judge(each, "freezes", "watches_itself")
    assert result.status is JobStatus.OK, result.detail
    assert "thaw" in result.value["refused"]
    assert min(result.value["longest"]) >= 0.39


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


# --- windows ---


@pytest.mark.parametrize("first", ["honest", "watches_itself", "forks_a_family"])
def test_a_window_holds_all_that_an_answer_takes(each: SandboxLane, first: str) -> None:
    result = judge(each, "asks_in_windows", first)
    assert result.status is JobStatus.OK, result.detail
    assert "freeze()" in result.value["refused"], "a cell that runs anyway has no window"
    assert result.value["said"] == ["late", "late"]
    assert min(result.value["seconds"]) >= 0.2, "not even what it slept through is left out"
    assert result.value["frozen"]


def test_who_wakes_while_all_are_stopped_is_found(each: SandboxLane) -> None:
    result = judge(each, "asks_in_windows", "wakes_itself")
    if result.status is JobStatus.OK:  # it tried in vain: a stop takes away what would have woken it
        assert result.value["ran"] is False
    else:
        assert result.fault in (Fault.RAN_WHILE_STOPPED, Fault.PROCESSES), result.detail


def test_a_candidate_does_not_choose_its_processors() -> None:
    if strongest_level() < ContainmentLevel.SYSCALLS:
        pytest.skip("no filter for system calls works here")
    with lane(strongest_level()) as opened:
        result = judge(opened, "bound_to_one_processor", "chooses_processors")
    assert result.value == [1, 1], result.detail


def test_shared_memory_keeps_its_size(each: SandboxLane) -> None:
    result = judge(each, "shares")
    assert result.value["said"] == "sealed sealed", result.detail
    assert result.value["data"] == list(range(1, 17))
    assert result.value["size"] == 4096


def test_a_cell_that_ends_before_it_is_resumed_says_how() -> None:
    """Played by this test, its server and its first process: the moment between two messages is a short one."""
    judge, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel, _inside = socket.socketpair()
    orders, first_process = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sent = [channel.fileno(), orders.fileno()]
    socket.send_fds(server, [json.dumps({"event": "cell", "cell": 1}).encode()], sent)
    cell = Cell(ServerConnection(judge), ResourceLimits())
    for none_left in (b"0", b"0"):  # stopped; all of them
        first_process.send(none_left)
    cell.freeze()

    def end() -> None:
        assert first_process.recv(64) == process_stops.STOP
        assert first_process.recv(64) == process_stops.CHECK
        first_process.shutdown(socket.SHUT_RD)
        first_process.send(b"0")  # none has moved
        server.send(json.dumps({"event": "end", "cell": 1, "why": "memory"}).encode())

    ending = threading.Thread(target=end)
    ending.start()
    with pytest.raises(CandidateFault, match=r"the memory limit was exceeded: \d+ MiB"):
        cell.thaw()
    ending.join()
    cell.close()


# --- who counts as having run ---


COUNTS = "while True: pass"


class Stopped:
    """A child that counts, stopped by a stopper of this process' children."""

    def __init__(self) -> None:
        self.child = subprocess.Popen([sys.executable, "-c", COUNTS])
        self.stopper = ProcessStopper(own_namespace=False, cell=self.child.pid)
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        while linux.processor_time_ns(self.child.pid) < 1_000_000:
            time.sleep(0.001)
        self.stopper.answer(STOP, (), self.theirs)
        assert self.ours.recv(64) == b"stopped"
        assert self.ours.recv(64) == b"0"

    def moved(self) -> int:
        self.stopper.answer(CHECK, (), self.theirs)
        return int(self.ours.recv(64))

    def run(self) -> None:
        """Let it go on until it has used a processor, and stop it behind the stopper's back."""
        before = linux.processor_time_ns(self.child.pid)
        os.kill(self.child.pid, signal.SIGCONT)
        while linux.processor_time_ns(self.child.pid) == before:
            time.sleep(0.0005)
        os.kill(self.child.pid, signal.SIGSTOP)
        while set(linux.task_states(self.child.pid)) != {"T"}:
            time.sleep(0.0005)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stopped]:
    others = set(linux.descendants(os.getpid()))  # other tests' processes are to go on
    result = linux.descendants
    monkeypatch.setattr(linux, "descendants", lambda pid: [p for p in result(pid) if p not in others])
    new = Stopped()
    yield new
    new.child.kill()
    new.child.wait()
    new.ours.close()
    new.theirs.close()


def test_who_stands_still_has_not_moved(stopped: Stopped) -> None:
    assert [stopped.moved() for _ in range(5)] == [0] * 5


def test_who_runs_has_moved(stopped: Stopped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_stops, "_LATE_NS", 0)
    stopped.run()
    assert stopped.moved() == 1


def test_the_last_instructions_before_a_stop_are_forgiven_a_few_times(
    stopped: Stopped, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_stops, "_LATE_NS", 10**12)  # however long this machine takes to stop it
    for _ in range(process_stops._MOST_LATE):
        stopped.run()
        assert stopped.moved() == 0
        assert stopped.moved() == 0, "it is forgiven once"
    stopped.run()
    assert stopped.moved() == 1


# --- a real device ---


DEVICE_LIMITS = ResourceLimits(wall_s=60, cpu_s=120, memory_bytes=8 << 30, processes=512)
SOURCE = Path(__file__).parents[1] / "device_faults.py"


@pytest.fixture(scope="module")
def opened() -> Iterator[SandboxLane]:
    with lane(device="0", warm=("torch", "triton")) as one:
        yield one


def run_on_device(opened: SandboxLane, function: str, limits: ResourceLimits = DEVICE_LIMITS) -> JobResult:
    return opened.run(
        SandboxJob(RUN, {"file": "s.py", "function": function}, {"s.py": SOURCE.read_text()}), limits
    )


@pytest.mark.gpu
def test_the_canary_sings_on_the_device(opened: SandboxLane) -> None:
    assert opened.healthy, opened.refused
    assert run_on_device(opened, "honest").value["returned"] == 64.0
    assert run_on_device(opened, "devices").value["returned"] == 1


@pytest.mark.gpu
def test_cells_begin_with_what_triton_would_have_to_build(opened: SandboxLane) -> None:
    assert any(name.startswith("cuda_utils") for name in run_on_device(opened, "toolchain").value["returned"])


DEVICE_FAULTS = {
    "illegal_address": Fault.EXCEPTION,
    "device_assert": Fault.EXCEPTION,
    "hangs": Fault.TIMEOUT,
    "hangs_and_leaves": Fault.EXIT,
}


@pytest.mark.gpu
@pytest.mark.parametrize("function", DEVICE_FAULTS)
def test_a_poisoned_device_is_fit_again_for_the_next(opened: SandboxLane, function: str) -> None:
    limits = replace(DEVICE_LIMITS, wall_s=6) if function == "hangs" else DEVICE_LIMITS
    result = run_on_device(opened, function, limits)
    assert (result.fault, result.status) == (DEVICE_FAULTS[function], JobStatus.CANDIDATE_ERROR), (
        result.detail
    )
    assert result.canary == "ok"
    assert run_on_device(opened, "honest").status is JobStatus.OK


@pytest.mark.gpu
def test_a_poison_that_is_hushed_up_stays_in_its_cell(opened: SandboxLane) -> None:
    assert run_on_device(opened, "poisons_in_silence").value["returned"] == "fine"
    assert run_on_device(opened, "honest").value["returned"] == 64.0


@pytest.mark.gpu
@pytest.mark.slow
def test_a_hundred_poisons_and_twenty_hangs_of_a_device_in_a_row(opened: SandboxLane) -> None:
    before = opened.restarts
    for i in range(100):
        result = run_on_device(opened, ("illegal_address", "device_assert")[i % 2])
        assert (result.fault, result.is_label) == (Fault.EXCEPTION, True), result.detail
    for _ in range(20):
        result = run_on_device(opened, "hangs", replace(DEVICE_LIMITS, wall_s=5))
        assert (result.fault, result.is_label) == (Fault.TIMEOUT, True), result.detail
        assert result.seconds - 5 < LOST_S
    assert opened.restarts == before
    assert run_on_device(opened, "honest").status is JobStatus.OK
