"""Configs of generated kernels that compile in Inductor's workers before anybody times them.

Coordinate descent compiles one config at a time, in the process that waits for the graph's first call, while the
workers have nothing to do: 16 of the 34 s of a first call (two layers of Qwen2 in prefilling, H200).
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future, TimeoutError

from forecast_integrations.inductor.descent.config_worker import ConfigJob, compile_config

Submit = Callable[[ConfigJob, Mapping[str, str]], "Future[float]"]
"""Starts `compile_config` somewhere; the result is the seconds that it took."""
PATIENCE_S = 30.0
"""Seconds to wait for a worker at most; then the waiting process compiles by itself."""
_ENVIRONMENT = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_LIBDEVICE_PATH")
"""Variables that a worker must have as this process has them, as Inductor tells its own jobs."""


class ConfigsAhead:
    """A queue in front of the workers, of which no more than `limit` configs compile at once, besides urgent ones."""

    def __init__(self, submit: Submit, limit: int) -> None:
        self._submit, self._limit = submit, max(1, limit)
        self._changed = threading.Condition()
        self._queue: deque[ConfigJob] = deque()
        self._begun: dict[ConfigJob, Future[float]] = {}
        self._running = 0
        self._has_thread = False

    def add(self, jobs: Iterable[ConfigJob], *, urgent: bool = False) -> None:
        """Compile these, each once; `urgent` ones begin now, the others when their turn comes."""
        if urgent:
            for job in jobs:
                self._begin(job)
            return
        with self._changed:
            self._queue.extend(job for job in jobs if job not in self._begun and job not in self._queue)
            if self._has_thread or not self._queue:
                return
            self._has_thread = True
        # Inductor's pool tells of an end under a lock that it takes to begin something, too: who hears of the end
        # must not begin the next one.
        threading.Thread(target=self._begin_in_turn, name="configs ahead", daemon=True).start()

    def wait(self, job: ConfigJob) -> tuple[float, float]:
        """Wait until a config is compiled, if a worker is at it; seconds that the worker took, and waited for.

        One that has not begun is left to the caller. Never raises: a failure shows where the caller compiles.
        """
        begin = time.perf_counter()
        with self._changed:
            if (future := self._begun.get(job)) is None:
                self._begun[job] = own = _ended(0.0)
                return own.result(), 0.0
        try:
            took = future.result(PATIENCE_S)
        except (Exception, CancelledError, TimeoutError):
            took = 0.0
        return took, time.perf_counter() - begin

    def forget(self, path: str) -> None:
        """Take out of the queue what belongs to a kernel that is decided."""
        with self._changed:
            self._queue = deque(job for job in self._queue if job.path != path)

    def _begin_in_turn(self) -> None:
        while True:
            with self._changed:
                while self._queue and self._running >= self._limit:
                    if not self._changed.wait(PATIENCE_S):  # a worker hangs
                        self._queue.clear()
                if not self._queue:
                    self._has_thread = False
                    return
                job = self._queue.popleft()
            self._begin(job)

    def _begin(self, job: ConfigJob) -> None:
        ends: Future[float] = Future()
        with self._changed:
            if job in self._begun:
                return
            self._begun[job] = ends
            self._running += 1
        try:
            future = self._submit(job, {v: os.environ[v] for v in _ENVIRONMENT if v in os.environ})
        except Exception as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(functools.partial(self._end, ends))

    def _end(self, ends: Future[float], done: Future[float]) -> None:
        failed = done.cancelled() or done.exception() is not None
        with self._changed:
            self._running -= 1
            self._changed.notify()
        ends.set_result(0.0 if failed else done.result())


def _ended(seconds: float) -> Future[float]:
    found: Future[float] = Future()
    found.set_result(seconds)
    return found


def inductor_workers() -> ConfigsAhead | None:
    """Configs ahead in Inductor's own pool, a few workers left to others; None where there is no pool."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    if not AsyncCompile.use_process_pool():
        return None

    def submit(job: ConfigJob, environment: Mapping[str, str]) -> Future[float]:
        started: Future[float] = AsyncCompile.process_pool().submit(compile_config, job, environment)
        return started

    return ConfigsAhead(submit, get_compile_threads() - 2)
