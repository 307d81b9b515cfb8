"""A signal in the middle of a fork: its handler runs afterwards, and what it raises is raised."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from forecast_integrations.triton.compile.children import deferred_signals, fork_process, fork_task

Handler = Callable[[int, FrameType | None], Any]
ROUNDS = 20


class OutOfTimeError(Exception):
    """What the handlers here raise."""


def give_up(number: int, frame: FrameType | None) -> None:
    raise OutOfTimeError


def noting_handler() -> tuple[list[int], Handler]:
    """The signals that came, and a handler that notes them there."""
    came: list[int] = []
    return came, lambda number, frame: came.append(number)


@pytest.fixture
def handle() -> Iterator[Callable[[signal.Signals, Handler], None]]:
    """Sets handlers, until the end of the test."""
    before: dict[signal.Signals, Any] = {}

    def set_handler(number: signal.Signals, handler: Handler) -> None:
        before.setdefault(number, signal.getsignal(number))
        signal.signal(number, handler)

    yield set_handler
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    for number, handler in before.items():
        signal.signal(number, handler)


def forked(run: Callable[[], int] = lambda: 0) -> int:
    """The pid of a child that leaves with the status that `run` returns."""
    pid = fork_process()
    if pid == 0:
        os._exit(run())
    return pid


def _be_interrupted() -> None:
    if INTERRUPTED:
        signal.raise_signal(signal.SIGALRM)


INTERRUPTED: list[bool] = []
"""Not empty: a signal comes in the middle of each fork."""
os.register_at_fork(after_in_parent=_be_interrupted)


def test_what_a_handler_raises_during_a_fork_is_raised(handle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python itself prints it and goes on."""
    handle(signal.SIGALRM, give_up)
    monkeypatch.setattr(sys.modules[__name__], "INTERRUPTED", [True])
    with pytest.raises(OutOfTimeError):
        forked()


def test_no_pipe_of_a_fork_that_a_handler_ends_stays_open(
    handle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle(signal.SIGALRM, give_up)
    monkeypatch.setattr(sys.modules[__name__], "INTERRUPTED", [True])
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OutOfTimeError):
        fork_task(lambda pipe: None, 0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_no_fork_leaves_loggings_lock_taken(handle: Any) -> None:
    """It would where a handler raises in the hook that lets the lock go, and no other thread could log any more."""
    handle(signal.SIGALRM, give_up)
    for _ in range(ROUNDS):
        with contextlib.suppress(OutOfTimeError):
            signal.setitimer(signal.ITIMER_REAL, 0.0005)  # less than a fork takes
            os.waitpid(forked(), 0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        name = f"{__name__}.{time.monotonic_ns()}"
        free = threading.Thread(target=logging.getLogger, args=(name,), daemon=True)
        free.start()
        free.join(30.0)
        assert not free.is_alive()


def test_the_child_of_a_fork_that_a_handler_ends_is_gone(
    handle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle(signal.SIGALRM, give_up)
    fork, pids = os.fork, []

    def noted() -> int:
        pid = fork()
        if pid:
            signal.raise_signal(signal.SIGALRM)
            pids.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", noted)
    with pytest.raises(OutOfTimeError):
        forked(lambda: time.sleep(20.0) or 0)
    (pid,) = pids
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)


def test_handlers_run_after_the_block_once_for_each_signal_in_order(handle: Any) -> None:
    came, note = noting_handler()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        handle(number, note)
    with deferred_signals():
        for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR2):
            signal.raise_signal(number)
        assert came == []
    assert came == [signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR2]


def test_all_handlers_are_back_where_one_raises(handle: Any) -> None:
    came, note = noting_handler()
    handle(signal.SIGUSR1, give_up)
    handle(signal.SIGUSR2, note)

    def fail_to_fork() -> None:
        with deferred_signals():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR2)
            raise OSError("no process can be had")

    with pytest.raises(OutOfTimeError):
        fail_to_fork()
    assert came == [signal.SIGUSR2]
    assert (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)) == (give_up, note)


def test_a_child_has_the_programs_handlers_and_none_of_its_signals(handle: Any) -> None:
    came, note = noting_handler()
    handle(signal.SIGUSR1, note)
    with deferred_signals():
        signal.raise_signal(signal.SIGUSR1)
        pid = os.fork()
    if pid == 0:
        os._exit(0 if signal.getsignal(signal.SIGUSR1) is note and not came else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert came == [signal.SIGUSR1]


def test_other_threads_change_no_handler(handle: Any) -> None:
    handle(signal.SIGUSR1, give_up)
    found: list[object] = []

    def look() -> None:
        with deferred_signals():
            found.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [give_up]
