"""Coordinate descent over the configs of one generated kernel, in waves that compile in Inductor's workers.

A wave is every config a step of one field away from the best so far (the first one also the kernel's own list).
Inductor's own descent compiles one config after the other in the process that waits for the graph's first call, while
the workers have nothing to do. Here the first waves of all kernels of a graph compile side by side. No wave is waited
for: a kernel's first launch runs the config that was compiled with it, and configs that workers have compiled by a
later launch are timed there.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, TimeoutError
from typing import TYPE_CHECKING

from forecast_integrations.inductor.config_worker import OTHER_CONFIGS, ConfigJob, compile_config
from forecast_integrations.triton.protocols import ConfigLauncher, LaunchConfig

if TYPE_CHECKING:
    from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

Submit = Callable[[ConfigJob, Mapping[str, str]], "Future[None]"]
"""Starts `compile_config` somewhere."""
_HANGS_S = 30.0
"""Seconds without an end after which a worker hangs: nothing more is given to it and its like."""
_ENVIRONMENT = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_LIBDEVICE_PATH")
"""Variables that a worker must have as this process has them, as Inductor tells its own jobs."""


class ConfigsAhead:
    """A queue in front of the workers, of which no more than `limit` configs compile at once, besides urgent ones."""

    def __init__(self, submit: Submit, limit: int) -> None:
        self._submit, self._limit = submit, max(1, limit)
        self._condition = threading.Condition()
        self._queue: deque[ConfigJob] = deque()
        self._begun: dict[ConfigJob, Future[None]] = {}
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
        with self._condition:
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
        with self._condition:
            future = self._begun.get(job)
        if future is None:
            return False
        if not future.done() and (left_s := until - time.perf_counter()) > 0:
            with contextlib.suppress(TimeoutError):
                future.result(left_s)
        return future.done()

    def forget(self, path: str) -> None:
        """Take out of the queue what belongs to a kernel that is decided."""
        with self._condition:
            self._queue = deque(job for job in self._queue if job.path != path)

    def _begin_in_turn(self) -> None:
        while True:
            with self._condition:
                while self._queue and self._running >= self._limit:
                    if not self._condition.wait(_HANGS_S):  # a worker hangs
                        self._queue.clear()
                if not self._queue:
                    self._has_thread = False
                    return
                job = self._queue.popleft()
            self._begin(job)

    def _begin(self, job: ConfigJob) -> None:
        ends: Future[None] = Future()
        with self._condition:
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

    def _end(self, ends: Future[None], done: Future[None]) -> None:
        with self._condition:
            self._running -= 1
            self._condition.notify()
        ends.set_result(None)


def inductor_workers() -> ConfigsAhead | None:
    """Configs ahead in Inductor's own pool, a few workers left to others; None where there is no pool."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    if not AsyncCompile.use_process_pool():
        return None

    def submit(job: ConfigJob, environment: Mapping[str, str]) -> Future[None]:
        started: Future[None] = AsyncCompile.process_pool().submit(compile_config, job, environment)
        return started

    return ConfigsAhead(submit, get_compile_threads() - 2)


_IMPROVES = 0.99
"""Below this share of the best time, the descent goes on from a config: a smaller gain is worth no wave, and medians
of a few launches in turns do not show it."""
STRAGGLER_S = 1.0
"""Seconds after which a wave is timed without the configs that still compile. With each timing the best is timed again,
so that whole waves cost less."""
PATIENCE_S = 30.0
"""Seconds that a kernel waits whose every launch may be recorded: then there is no later one."""
_MAX_WAVES = 12
LAUNCH_SHARE = 0.1
"""The most of any second of a program's launches that timing takes."""


class LaunchShare:
    """Seconds that timing has taken of later launches. More than a second's share at once is waited out tenfold."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` gives seconds."""
        self.clock = clock
        self.each_s = 0.01
        """Seconds for one config, as far as is known: quick to rise."""
        self._shares: deque[tuple[float, float]] = deque()
        """When each share counts no more, and its seconds."""
        self._sum_s = 0.0

    def configs(self) -> int:
        """Return the number of configs that may be timed now, beside the best so far."""
        now = self.clock()
        while self._shares and self._shares[0][0] <= now:
            self._sum_s -= self._shares.popleft()[1]
        if not self._shares:
            self._sum_s = 0.0
            return max(1, int(LAUNCH_SHARE / self.each_s) - 1)  # one at least is timed at some time
        return max(0, int((LAUNCH_SHARE - self._sum_s) / self.each_s) - 1)

    def take(self, seconds: float, count: int) -> None:
        """Note the seconds that a launch has lost by now, and the configs that were timed in them."""
        if count:
            self.each_s = max(0.5 * self.each_s, seconds / count)
        self._shares.append((self.clock() + max(1.0, seconds / LAUNCH_SHARE), seconds))
        self._sum_s += seconds


class Descent:
    """One kernel's descent: what it has timed, what compiles for it, and where it stands."""

    def __init__(self, ahead: ConfigsAhead, kernel: CachingAutotuner, *, patient: bool) -> None:
        self._ahead, self._tuner, self._path = ahead, kernel.coordesc_tuner, str(kernel.filename)
        self.patient = patient
        """Whether every wave is waited for, and timed at the first launch."""
        self.lock = threading.Lock()
        """Held by the thread that times a wave."""
        self.launcher: ConfigLauncher = kernel.launchers[0]
        """Launches the best config so far."""
        self.best = self.launcher.config
        self.timed = 0
        """Configs that have a time, besides the one that it begins with."""
        self._waves, self._began = 0, 0.0
        self._wave: list[LaunchConfig] = []
        """Not timed yet."""
        self._seen = {self._job(self.best)}
        self._begin(first_wave(kernel))

    @property
    def done(self) -> bool:
        """Whether there is nothing left to time."""
        return not self._wave

    def ready(self) -> list[LaunchConfig]:
        """The configs to time now: a compiled wave, what is compiled of a slow one, or all after a wait if patient."""
        ahead, begin = self._ahead, time.perf_counter()
        until = begin + PATIENCE_S if self.patient and not ahead.hangs else begin
        compiled = [c for c in self._wave if ahead.has_ended(self._job(c), until)]
        if self.patient:  # nobody waits for ever: what no worker has finished compiles where it is launched
            ahead.hangs = ahead.hangs or len(compiled) < len(self._wave)
            return list(self._wave)
        whole = len(compiled) == len(self._wave)
        return compiled if whole or begin - self._began > STRAGGLER_S else []

    def add_times(self, times: Mapping[LaunchConfig, float]) -> None:
        """Take milliseconds of `best` and of configs that were ready, inf for failures."""
        self.timed += len(times.keys() - {self.best})
        self._wave = [c for c in self._wave if c not in times]
        fastest = min(times, key=times.__getitem__)
        if times[fastest] < times[self.best] * _IMPROVES:
            self.best = fastest
            if self._waves < _MAX_WAVES:
                self._begin(neighbours(self._tuner, fastest))
        if self.done:
            self._ahead.forget(self._path)

    def _begin(self, configs: Iterable[LaunchConfig]) -> None:
        new = {job: c for c in configs if (job := self._job(c)) not in self._seen}
        self._seen |= new.keys()
        self._wave += new.values()
        self._waves, self._began = self._waves + 1, time.perf_counter()
        self._ahead.add(new, urgent=True)

    def _job(self, config: LaunchConfig) -> ConfigJob:
        return job_of(self._tuner, self._path, config)


def first_wave(kernel: CachingAutotuner) -> list[LaunchConfig]:
    """The configs of the kernel's own list, and those a step from the one that it begins with."""
    begin = kernel.launchers[0].config
    own: list[LaunchConfig] = getattr(kernel, OTHER_CONFIGS, [])
    return [*own, *neighbours(kernel.coordesc_tuner, begin)]


def first_jobs(kernel: CachingAutotuner) -> list[ConfigJob]:
    """Return the jobs of a kernel's first wave."""
    tuner, path = kernel.coordesc_tuner, str(kernel.filename)
    jobs = dict.fromkeys(job_of(tuner, path, c) for c in first_wave(kernel))
    jobs.pop(job_of(tuner, path, kernel.launchers[0].config), None)
    return list(jobs)


def neighbours(tuner: CoordescTuner, config: LaunchConfig) -> Iterator[LaunchConfig]:
    """The configs that differ from this one by a step of one field, in the order of Inductor's descent."""
    from torch._inductor.runtime.coordinate_descent_tuner import get_field, set_field

    for name in tuner.tunable_fields:
        if (value := get_field(config, name)) is None:
            continue
        for neighbour_value in tuner.get_neighbour_values(name, value):
            neighbour = copy.deepcopy(config)
            set_field(neighbour, name, neighbour_value)
            valid = getattr(tuner, "is_valid_config", None)
            if valid is None or valid(neighbour):
                yield neighbour


def job_of(tuner: CoordescTuner, path: str, config: LaunchConfig) -> ConfigJob:
    """Describe a config to a worker."""
    return ConfigJob(path, tuner.name, tuple(config.kwargs.items()), config.num_warps, config.num_stages)
