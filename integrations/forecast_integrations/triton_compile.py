"""Compile candidates on threads of our own, without launching them.

Daemon threads, because a compilation that hangs must not keep the interpreter from exiting (the
threads of `concurrent.futures` are joined at exit).
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from forecast_autotune.records import Candidate


@dataclass
class Compiled:
    """One finished compilation: a kernel or an error."""

    candidate: Candidate
    kernel: Any = None
    error: BaseException | None = None
    seconds: float = 0.0


_POOLS: weakref.WeakSet[CompilePool] = weakref.WeakSet()
_EXIT_S = 60.0
"""At exit, how long to wait for compilations under way: the compiler does not survive being torn down."""


@atexit.register
def _finish() -> None:
    limit = time.monotonic() + _EXIT_S
    for pool in list(_POOLS):
        pool.close()
        for thread in pool.threads:
            thread.join(max(0.0, limit - time.monotonic()))


@dataclass(eq=False)
class CompilePool:
    """`workers` threads that call `compile_one(candidate)` and put the results into `done`."""

    compile_one: Callable[[Candidate], Any]
    workers: int
    prepare: Callable[[], None]
    """Called once in every thread, before its first task (to select the device)."""
    done: queue.SimpleQueue[Compiled] = field(default_factory=queue.SimpleQueue)
    compile_s: float = 0.0
    finished: int = 0
    _waiting: queue.SimpleQueue[Candidate | None] = field(default_factory=queue.SimpleQueue)
    threads: list[threading.Thread] = field(default_factory=list)
    _submitted: dict[Candidate, float] = field(default_factory=dict)
    _running: dict[Candidate, float] = field(default_factory=dict)
    _closed: bool = False

    def __post_init__(self) -> None:
        _POOLS.add(self)

    def submit(self, candidates: Sequence[Candidate]) -> None:
        """Queue candidates not submitted before, in order."""
        for candidate in candidates:
            if candidate in self._submitted:
                continue
            self._submitted[candidate] = time.perf_counter()
            self._waiting.put(candidate)
            if len(self.threads) < min(self.workers, len(self._submitted)):
                thread = threading.Thread(target=self._work, name="forecast-compile", daemon=True)
                self.threads.append(thread)
                thread.start()

    def hung(self, timeout_s: float) -> list[Candidate]:
        """Candidates whose compilation has been running for longer than `timeout_s` seconds."""
        limit = time.perf_counter() - timeout_s
        return [c for c, began in list(self._running.items()) if began < limit]

    def abandon(self, candidate: Candidate) -> None:
        """Stop waiting for a hung compilation; its thread is replaced."""
        self._running.pop(candidate, None)
        thread = threading.Thread(target=self._work, name="forecast-compile", daemon=True)
        self.threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Drop what has not started; running compilations end by themselves."""
        self._closed = True
        for _ in self.threads:
            self._waiting.put(None)

    def _work(self) -> None:
        try:
            self.prepare()
        except Exception as error:
            # A thread that cannot reach the device reports it on the first task it would have done.
            candidate = self._waiting.get()
            if candidate is not None:
                self.done.put(Compiled(candidate, error=error))
            return
        while (candidate := self._waiting.get()) is not None and not self._closed:
            begin = time.perf_counter()
            self._running[candidate] = begin
            result = Compiled(candidate)
            try:
                result.kernel = self.compile_one(candidate)
            except BaseException as error:
                result.error = error
            result.seconds = time.perf_counter() - begin
            if self._running.pop(candidate, None) is None:
                continue  # abandoned as hung: its outcome is already recorded
            self.compile_s += result.seconds
            self.finished += 1
            self.done.put(result)
