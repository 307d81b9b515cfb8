"""Children that hang since they were forked: found by what they compute, and started again."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from forecast_autotune.records import Candidate, Config
from forecast_integrations.triton.compile import children
from forecast_integrations.triton.compile.children import HUNG_S, HungProcesses
from forecast_integrations.triton.compile.pool import CompileResult, ForkPool
from forecast_integrations.triton.problem.call import KernelCall
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells what a process computes")
BUSY = "while True: pass"
LISTED = [Candidate(Config.of({"BLOCK": n})) for n in range(2)]
LOCK = threading.Lock()


@contextmanager
def group(code: str) -> Iterator[int]:
    """A process group that runs this Python."""
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        yield process.pid
    finally:
        subprocess.run(["pkill", "-KILL", "-g", str(process.pid)], check=False)
        process.wait()


def compiled(
    compile_one: Callable[[Candidate], object], while_hung: Callable[[], object]
) -> list[CompileResult]:
    """Results of `LISTED` by a pool of which a child is waited for; `while_hung` is called before each wait."""
    call: Any = KernelCall(None, (), {}, dict.fromkeys(LISTED))  # type: ignore[arg-type]
    pool = ForkPool(compile_one, 2, 60.0, call=call)
    pool.while_waiting = while_hung
    try:
        pool.schedule(LISTED)
        found = [pool.next() for _ in LISTED]
    finally:
        pool.close()
    assert None not in found
    return [result for result in found if result is not None]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children count as hung after a second."""
    monkeypatch.setattr(children, "HUNG_S", 1.0)
    monkeypatch.setattr(children, "HUNG_S", 1.0)
    monkeypatch.setattr(children, "_WATCH_S", 0.1)


def test_what_sleeps_hangs_and_what_it_waits_for_may_be_at_work() -> None:
    now = 0.0
    hung = HungProcesses(lambda: now)
    waiting = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"
    with group("import time; time.sleep(600)") as asleep, group(BUSY) as busy, group(waiting) as waits:
        leaders = [asleep, busy, waits]
        settled = eventually(lambda: _sleeps_alone(leaders))
        assert settled, "the one has begun to sleep, and the others to work"
        assert not hung.among(leaders)
        now = HUNG_S - 1
        assert not hung.among(leaders)
        now = HUNG_S
        assert hung.among(leaders) == {asleep}
        assert not hung.among([busy]), "what is no longer asked about is forgotten"
        assert not hung.among(leaders)


def _sleeps_alone(leaders: list[int]) -> bool:
    before = children.processor_ticks(leaders)
    time.sleep(0.1)
    after = children.processor_ticks(leaders)
    same = [before[one] is not None and before[one] == after[one] for one in leaders]
    return same == [True, False, False]


@pytest.mark.usefixtures("soon")
def test_a_lock_that_was_held_at_the_fork_costs_seconds_and_no_candidate() -> None:
    LOCK.acquire()

    def compile_one(candidate: Candidate) -> None:
        if candidate == LISTED[0]:
            with LOCK:
                pass

    def release() -> None:
        if LOCK.locked():
            LOCK.release()  # the dispatcher is forked by now, and its children have the lock for ever

    found = compiled(compile_one, release)
    assert {result.candidate for result in found} == set(LISTED)
    assert all(result.outcome is None and result.error is None for result in found)


@pytest.mark.usefixtures("soon")
def test_a_dispatcher_that_hangs_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "run_dispatcher", lambda *_: time.sleep(600))
    found = compiled(lambda _: None, lambda: None)
    assert {result.candidate for result in found} == set(LISTED)
    assert all(result.outcome is None and result.error is None for result in found)
