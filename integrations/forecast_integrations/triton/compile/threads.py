"""Compile on threads of this process, where children cannot be had."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from forecast_autotune.records import Candidate, Outcome
from forecast_integrations.triton.compile.protocol import CompileResult
from forecast_integrations.triton.problem.call import outcome_of

_MAX_THREAD_TRIES = 4


class ThreadPool:
    """Compile on daemon threads, where there is no `fork`. Timing has to wait until they are done.

    Daemon threads, because a compilation that hangs must not keep the interpreter from exiting (the
    threads of `concurrent.futures` are joined at exit).
    """

    quiet = False

    def __init__(
        self,
        compile_one: Callable[[Candidate], object],
        workers: int,
        timeout_s: float,
        prepare: Callable[[], None],
    ) -> None:
        self.compile_s = 0.0
        self.finished = 0
        self._compile, self._workers, self._timeout_s = compile_one, workers, timeout_s
        self._prepare = prepare
        self._waiting: queue.SimpleQueue[Candidate | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[CompileResult] = queue.SimpleQueue()
        self._running: dict[Candidate, float] = {}
        self._submitted: set[Candidate] = set()
        self._threads = 0
        self._closed = False
        self.while_waiting: Callable[[], object] = lambda: None

    def schedule(self, candidates: Sequence[Candidate]) -> None:
        """Queue candidates in place of those that wait; what a thread has begun, it ends."""
        with contextlib.suppress(queue.Empty):
            while True:
                if (waiting := self._waiting.get_nowait()) is not None:
                    self._submitted.discard(waiting)
        for candidate in candidates:
            if candidate not in self._submitted:
                self._submitted.add(candidate)
                self._waiting.put(candidate)
                if self._threads < self._workers:
                    self._spawn()

    def compiling(self) -> Mapping[Candidate, float]:
        """What compiles now, with its seconds."""
        now = time.perf_counter()
        return {candidate: now - began for candidate, began in list(self._running.items())}

    def next(self, within_s: float | None = None) -> CompileResult | None:
        """Wait for a thread; one that exceeds the timeout is left behind and replaced."""
        until = math.inf if within_s is None else time.perf_counter() + within_s
        while True:
            try:
                return self._done.get(timeout=max(0.0, min(0.25, until - time.perf_counter())))
            except queue.Empty:
                limit = time.perf_counter() - self._timeout_s
            if time.perf_counter() >= until:
                return None
            for candidate, began in list(self._running.items()):
                if began < limit and self._running.pop(candidate, None) is not None:
                    self._spawn()
                    message = f"TimeoutError: not compiled after {self._timeout_s:g} s"
                    return CompileResult(candidate, self._timeout_s, Outcome.TIMEOUT, message, began_s=began)

    def done(self) -> list[CompileResult]:
        """Collect what the threads have finished by now."""
        found: list[CompileResult] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._done.get_nowait())
        return found

    def close(self) -> None:
        """Drop what has not started, and wait for what has: a compiler cannot be interrupted."""
        self._closed = True
        for _ in range(self._threads):
            self._waiting.put(None)
        limit = time.perf_counter() + self._timeout_s
        while self._running and time.perf_counter() < limit:
            time.sleep(0.01)

    def _attempt(self, candidate: Candidate) -> None:
        for _ in range(_MAX_THREAD_TRIES - 1):
            try:
                self._compile(candidate)
            except SystemError:
                # CPython 3.11's ast.parse counts its depth for all threads together and trips over it
                # now and then ("AST constructor recursion depth mismatch"): the kernel is innocent.
                continue
            return
        self._compile(candidate)

    def _spawn(self) -> None:
        self._threads += 1
        threading.Thread(target=self._work, name="forecast-compile", daemon=True).start()

    def _work(self) -> None:
        try:
            self._prepare()
        except Exception as error:
            while (candidate := self._waiting.get()) is not None and not self._closed:
                message = f"a compile thread could not select the device: {error}"
                self._done.put(CompileResult(candidate, 0.0, Outcome.INFRASTRUCTURE, message))
            return
        while (candidate := self._waiting.get()) is not None and not self._closed:
            begin = self._running[candidate] = time.perf_counter()
            result = CompileResult(candidate, began_s=begin)
            try:
                self._attempt(candidate)
            except BaseException as error:
                outcome = outcome_of(error)
                result.message = f"{type(error).__name__}: {error}"[:2000]
                result.outcome = Outcome.COMPILE_ERROR if outcome is Outcome.RUNTIME_ERROR else outcome
                result.error = error if outcome is None else None
                result.raised = True
            result.seconds = time.perf_counter() - begin
            if self._running.pop(candidate, None) is None:
                continue  # left behind as hung: its outcome is already recorded
            self.compile_s += result.seconds
            self.finished += 1
            self._done.put(result)
