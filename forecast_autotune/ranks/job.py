"""One rank's place in a job: its name, its store behind one thread, its clock, and how long it waits for others."""

from __future__ import annotations

import atexit
import itertools
import os
import queue
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from forecast_autotune.errors import ForecastAutotuneError

T = TypeVar("T")

_EXIT_S = 2.0
"""How long the end of the process waits for a call that is under way, in seconds."""


class RankWarning(UserWarning):
    """Something about sharing with other ranks went wrong; this rank goes on without it."""


class JobStoreLostError(ForecastAutotuneError):
    """The job's store does not answer, or not in time: from here on a rank is on its own."""


class KeyValueStore(Protocol):
    """Texts by key, shared by the processes of a job. None of its methods waits for another process."""

    def get(self, key: str) -> str | None:
        """The key's value; None where it has none."""
        ...

    def set(self, key: str, value: str) -> None:
        """Write, whatever the key holds."""
        ...

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Write `desired` if the key holds `expected`, or nothing where that is ""; returns what it holds then."""
        ...


@dataclass(frozen=True)
class JobLimits:
    """How long ranks wait for each other, in seconds of their own clocks, which are never compared."""

    wait_s: float = 60.0
    """A rank that waits for a decision and hears of no new measurement for so long decides by itself."""
    lease_s: float = 10.0
    """A rank that gave no sign of life for so long has lost its claim."""
    beat_s: float = 1.0
    """A living rank gives a sign of life so often."""
    poll_s: float = 0.01
    """How soon a rank looks for the decision for the first time, ..."""
    idle_poll_s: float = 0.1
    """... and how often at least it looks."""


@dataclass
class Job:
    """The means by which one process shares decisions with the other ranks of its job."""

    store: StoreConnection
    rank: int
    size: int
    """How many ranks the job has."""
    limits: JobLimits = field(default_factory=JobLimits)
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    """No other process of the job, not even an earlier one of the same rank, has this name."""
    left: str = ""
    """Why this process shares no longer; empty while it does."""
    _has_complained: bool = False

    def leave(self, error: Exception) -> None:
        """Stop sharing for the rest of this process, with one warning: its failures do not fail a decision."""
        if not self.left:
            self.left = str(error) if isinstance(error, JobStoreLostError) else repr(error)
            warnings.warn(
                f"rank {self.rank} tunes by itself from here on: {self.left}", RankWarning, stacklevel=3
            )

    def complain(self, error: Exception) -> None:
        """Warn, once, about a malformed record of another rank."""
        if not self._has_complained:
            self._has_complained = True
            text = f"rank {self.rank} ignores another rank's decision: {type(error).__name__}: {error}"
            warnings.warn(text[:400], RankWarning, stacklevel=3)


class StoreConnection:
    """A job's store, with beats that show that this process lives. One thread alone opens, uses and beats on it.

    Clients of such stores wait as long as their server is silent, and some take one call at a time. Here a call
    that is not answered within `timeout_s` seconds ends the connection: it and all later ones raise
    `JobStoreLostError`. The thread is a daemon, starts with the first call and ends before the interpreter does.
    """

    def __init__(self, open_store: Callable[[], KeyValueStore], *, timeout_s: float, beat_s: float) -> None:
        self._open, self._timeout_s, self._beat_s = open_store, timeout_s, beat_s
        self._calls: queue.SimpleQueue[tuple[Callable[[KeyValueStore], Any], Future[Any]]] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._mutex = threading.Lock()
        self._beating: dict[str, int] = {}
        """Keys to beat on, with how many blocks are entered for each."""
        self._fault = ""
        self._process = os.getpid()
        _connections.add(self)

    def get(self, key: str) -> str | None:
        """The key's value; None where it has none."""
        return self._call(lambda store: store.get(key))

    def set(self, key: str, value: str) -> None:
        """Write, whatever the key holds."""
        self._call(lambda store: store.set(key, value))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Write `desired` if the key holds `expected`, or nothing where that is ""; returns what it holds then."""
        return self._call(lambda store: store.compare_set(key, expected, desired))

    @contextmanager
    def beating(self, key: str) -> Iterator[None]:
        """While entered, the value of `key` changes every `beat_s` seconds if this process lives."""
        with self._mutex:
            self._beating[key] = self._beating.get(key, 0) + 1
        with suppress(JobStoreLostError):
            self._call(lambda store: None)  # an idle thread wakes, and begins to beat
        try:
            yield
        finally:
            with self._mutex:
                self._beating[key] -= 1
                if not self._beating[key]:
                    del self._beating[key]

    def close(self) -> None:
        """End the thread, and wait `_EXIT_S` seconds at most for the call that it makes."""
        self._fault = self._fault or "the process ends"
        with self._mutex:
            thread = self._thread
        if thread is not None and os.getpid() == self._process:
            self._calls.put((lambda store: None, Future()))
            thread.join(_EXIT_S)

    def _call(self, act: Callable[[KeyValueStore], T]) -> T:
        if os.getpid() != self._process:
            self._fault = "a forked process has no thread for it"
        if not self._fault:
            answer: Future[T] = Future()
            self._calls.put((act, answer))
            self._start()
            try:
                return answer.result(self._timeout_s)
            except Exception as error:
                reason = str(error).partition("\n")[0] or f"no answer within {self._timeout_s:g} s"
                self._fault = f"the job's store failed: {type(error).__name__}: {reason}"[:300]
        raise JobStoreLostError(self._fault)

    def _start(self) -> None:
        with self._mutex:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="rank sharing", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        try:
            store = self._open()
        except Exception as error:
            self._calls.get()[1].set_exception(
                error
            )  # of the call that started the thread; it is the last one
            return
        beats, due = itertools.count(1), 0.0
        while not self._fault:
            with self._mutex:
                keys = list(self._beating)
            with suppress(queue.Empty):
                wait_s = max(0.0, due - time.monotonic()) if keys else None
                act, answer = self._calls.get(timeout=wait_s)
                try:
                    answer.set_result(act(store))
                except Exception as error:
                    answer.set_exception(error)
            if keys and time.monotonic() >= due:
                due = time.monotonic() + self._beat_s
                for key in keys:
                    with suppress(Exception):  # the next call finds out
                        store.set(key, str(next(beats)))


_connections: weakref.WeakSet[StoreConnection] = weakref.WeakSet()


def _close_all() -> None:
    # The interpreter unwinds a thread that returns from C++ after its end, and a C++ frame that may not be unwound
    # aborts the process then: exit status 134 of a program that has done all its work.
    for connection in list(_connections):
        connection.close()


atexit.register(_close_all)
