"""Lanes that need the same modules are forks of one process that has imported them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from forecast_harness.sandbox import warm_process
from forecast_harness.sandbox.api import JobStatus, ResourceLimits, SandboxError, SandboxJob, SandboxLane
from forecast_harness.sandbox.containment import linux
from forecast_harness.sandbox.lane_pools import CpuLanes, LanePool, lane_count
from tests.harness.lanes import RUN, SMALL, lane, run
from tests.waiting import is_running, parent_of, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


def open_files(pid: int) -> list[str]:
    """What its descriptors lead to, but for those that it closes meanwhile."""
    result = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            result.append(str(entry.readlink()))
    return result


def test_lanes_that_need_the_same_have_one_parent_and_it_ends_with_the_last() -> None:
    with ExitStack() as first:
        with lane() as kept:
            one = first.enter_context(lane())
            shared = parent_of(one.server_pid)
            assert shared == parent_of(kept.server_pid) != os.getpid()
            assert one.server_pid != kept.server_pid
            first.close()
            assert is_running(shared)
            assert run(kept, "honest").status is JobStatus.OK
            with lane() as later:
                assert parent_of(later.server_pid) == shared
        assert not is_running(shared)


def test_lanes_that_need_something_else_have_another_parent_of() -> None:
    with lane() as plain, lane(environment={"ANOTHER": "1"}) as other, lane(warm=("fractions",)) as third:
        assert len({parent_of(one.server_pid) for one in (plain, other, third)}) == 3


def test_a_folder_that_joins_the_search_path_costs_no_second_import(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = {"paths.py": "import sys\n\n\ndef search_path():\n    return sys.path\n"}
    job = SandboxJob(RUN, {"file": "paths.py", "function": "search_path"}, data)
    with lane() as before:
        monkeypatch.syspath_prepend(str(tmp_path))
        with lane() as after:
            assert parent_of(before.server_pid) == parent_of(after.server_pid)
            paths = [opened.run(job, SMALL).value["returned"] for opened in (before, after)]
    assert [str(tmp_path) in path for path in paths] == [False, True]


def test_a_lane_sees_its_own_folder_and_no_other_lanes() -> None:
    with lane() as one, lane() as two:
        folders = [Path(f"/proc/{opened.server_pid}/cwd").readlink() for opened in (one, two)]
        assert len(set(folders)) == 2
        inherited = open_files(two.server_pid)
    assert any(str(folders[1]) in name for name in inherited), "its own log"
    assert not any(str(folders[0]) in name for name in inherited)


def test_open_lanes_outlive_the_process_that_they_were_forked_from() -> None:
    with lane() as opened:
        shared = parent_of(opened.server_pid)
        os.kill(shared, signal.SIGKILL)
        wait_until(lambda: not is_running(shared))
        assert run(opened, "honest").status is JobStatus.OK
        with lane() as later:  # a new one is started for it
            assert parent_of(later.server_pid) not in (shared, os.getpid())
            assert run(later, "honest").status is JobStatus.OK
            os.kill(opened.server_pid, signal.SIGKILL)
            assert run(opened, "honest").status is JobStatus.INFRA_ERROR
            assert run(opened, "honest").status is JobStatus.OK
            assert parent_of(opened.server_pid) == parent_of(later.server_pid)


def test_a_request_that_was_interrupted_is_answered_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with lane() as opened:
        before = set(linux.children(parent_of(opened.server_pid)))

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(warm_process, "select", SimpleNamespace(select=interrupt))
            with pytest.raises(KeyboardInterrupt), lane():
                raise AssertionError("it opened")
        with lane() as later:
            assert run(later, "honest").status is JobStatus.OK
            ours = {opened.server_pid, later.server_pid}
            wait_until(lambda: set(linux.children(parent_of(later.server_pid))) - before <= ours)


def test_many_lanes_open_at_once() -> None:
    opened: list[SandboxLane] = []
    lock = threading.Lock()

    def open_one(_: int) -> None:
        one = SandboxLane(warm=())
        one.__enter__()
        with lock:
            opened.append(one)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(open_one, range(8)))
    try:
        assert len({one.server_pid for one in opened}) == 8
        assert len({parent_of(one.server_pid) for one in opened}) == 1
    finally:
        for one in opened:
            one.close()
    assert not any(key[0] == os.getpid() and not key[1].modules[:-1] for key in warm_process._processes)


def test_lanes_that_still_open_are_not_waited_for_when_their_pool_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm_process, "SERVER_COMMAND", "import time; time.sleep(3600)")
    environment = {"NEVER": "imported"}
    lanes = LanePool(lambda: SandboxLane(environment=environment, warm=()), 2)
    lanes.open_ahead(2)
    lanes.close()
    with pytest.raises(SandboxError, match="nobody waits"), lanes.borrowed():
        raise AssertionError("it opened")
    monkeypatch.undo()
    with lane(environment=environment) as later:  # nobody else is given what was given up
        assert run(later, "honest").status is JobStatus.OK


def test_a_process_that_others_wait_for_goes_on() -> None:
    with lane() as one:
        process = one._warm_process
        assert process is not None
        warm_process.give_up(process, 1)  # it has forked a server already
        with lane() as two:
            assert parent_of(one.server_pid) == parent_of(two.server_pid)
            assert run(two, "honest").status is JobStatus.OK


def test_a_process_that_cannot_be_started_is_told_with_what_it_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm_process, "SERVER_COMMAND", "raise SystemExit('nothing works today')")
    with pytest.raises(SandboxError, match="nothing works today"), lane(environment={"NOT": "started"}):
        raise AssertionError("it opened")


# --- lanes on processors ---


LIMITS = ResourceLimits(wall_s=60.0, trusted_s=60.0)
ENTRY = "tests.harness.clocks.lane_jobs:wait"


@pytest.fixture
def lanes() -> Iterator[CpuLanes]:
    with contextlib.closing(CpuLanes(None, LIMITS, count=2)) as made:
        yield made


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
