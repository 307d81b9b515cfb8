"""Configs of generated kernels that compile in Inductor's workers before anybody times them.

Coordinate descent compiles one config at a time, in the process that waits for the graph's first call, while the
workers have nothing to do.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, TimeoutError

from forecast_integrations.inductor.descent.config_worker import ConfigJob, compile_config

Submit = Callable[[ConfigJob, Mapping[str, str]], "Future[float]"]
"""Starts `compile_config` somewhere; the result is the seconds that it took."""
_HANGS_S = 30.0
"""Seconds without an end after which a worker hangs: nothing more is given to it and its like."""
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
        self.hangs = False
        """Whether somebody has waited in vain who had to: nobody does so again."""

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

    def has_ended(self, job: ConfigJob, until: float) -> bool:
        """Whether a worker is done with a config, by `until` (`time.perf_counter`) at the latest.

        Never raises: a failure shows where the config is launched.
        """
        with self._changed:
            future = self._begun.get(job)
        if future is None:
            return False
        if not future.done() and (left_s := until - time.perf_counter()) > 0:
            with contextlib.suppress(TimeoutError):
                future.result(left_s)
        return future.done()

    def seconds(self, job: ConfigJob) -> float:
        """Seconds that a worker took for a config; zero if none has ended with it."""
        with self._changed:
            future = self._begun.get(job)
        return future.result() if future is not None and future.done() else 0.0

    def forget(self, path: str) -> None:
        """Take out of the queue what belongs to a kernel that is decided."""
        with self._changed:
            self._queue = deque(job for job in self._queue if job.path != path)

    def _begin_in_turn(self) -> None:
        while True:
            with self._changed:
                while self._queue and self._running >= self._limit:
                    if not self._changed.wait(_HANGS_S):  # a worker hangs
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


def inductor_workers() -> ConfigsAhead | None:
    """Configs ahead in Inductor's own pool, a few workers left to others; None where there is no pool."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    if not AsyncCompile.use_process_pool():
        return None

    def submit(job: ConfigJob, environment: Mapping[str, str]) -> Future[float]:
        started: Future[float] = AsyncCompile.process_pool().submit(compile_config, job, environment)
        return started

    return ConfigsAhead(submit, get_compile_threads() - 2)
