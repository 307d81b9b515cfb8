"""Who counts as having run while stopped: whoever has used a processor for more than it takes to stand still."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from forecast_harness.sandbox import process_stops
from forecast_harness.sandbox.containment import linux
from forecast_harness.sandbox.process_stops import CHECK, STOP, ProcessStopper

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
