"""Coordinate descent over the configs of one generated kernel, in waves that compile in Inductor's workers.

A wave is every config a step of one field away from the best so far (the first one also the kernel's own list).
Inductor's own descent compiles one config after the other in the process that waits for the graph's first call.
Here the first waves of all kernels of a graph compile side by side. No wave is waited for: a kernel's first launch runs
the config that was compiled with it, and what workers have compiled by a later launch is timed there.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from forecast_integrations.inductor.descent.config_worker import OTHER_CONFIGS, ConfigJob
from forecast_integrations.inductor.descent.configs_ahead import ConfigsAhead
from forecast_integrations.triton.protocols import ConfigLauncher, LaunchConfig

if TYPE_CHECKING:
    from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

_IMPROVES = 0.99
"""Below this share of the best time, the descent goes on from a config: what less is worth no wave, and medians of a
few launches in turns do not tell it."""
STRAGGLER_S = 1.0
"""Seconds after which a wave is timed without the configs that still compile. With each timing the best is timed again,
so that whole waves cost less."""
PATIENCE_S = 30.0
"""Seconds that a kernel waits whose every launch may be recorded: then there is no later one."""
INDUCTOR_TIMING_S = 0.022
"""Seconds in which Inductor times one config (torch 2.11, H200), by `benchmarks.inductor.whole_models`."""
_ALONE_RATIO = 0.6
"""Seconds for a config that the process compiles alone, per second that a worker took while all others were at work:
with it, what is claimed for the descents of ViT, BERT and Llama is 1.0, 0.6 and 1.0 of what Inductor takes for them
(the same runs)."""
_MAX_WAVES = 12


class Descent:
    """One kernel's descent: what it has timed, what compiles for it, and where it stands."""

    def __init__(self, ahead: ConfigsAhead, kernel: CachingAutotuner, *, patient: bool) -> None:
        self._ahead, self._tuner, self._path = ahead, kernel.coordesc_tuner, str(kernel.filename)
        self.patient = patient
        """Whether every wave is waited for, and timed at the first launch."""
        self.lock = threading.Lock()
        """Held by the thread that times a wave."""
        self.launcher: ConfigLauncher = kernel.launchers[0]
        """That of the best config so far."""
        self.best = self.launcher.config
        self.timed = 0
        """Configs that have a time, besides the one that it begins with."""
        self.saved_s = 0.0
        """Seconds that Inductor's descent would have taken in this process, less those that this one took."""
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
        found = [c for c in self._wave if ahead.has_ended(self._job(c), until)]
        self.saved_s -= time.perf_counter() - begin
        if self.patient:  # nobody waits for ever: what no worker has finished compiles where it is launched
            ahead.hangs = ahead.hangs or len(found) < len(self._wave)
            return list(self._wave)
        whole = len(found) == len(self._wave)
        return found if whole or begin - self._began > STRAGGLER_S else []

    def told(self, times: Mapping[LaunchConfig, float], seconds: float) -> None:
        """Milliseconds of `best` and of configs that were ready, inf for failures, and the seconds that took."""
        asked = [c for c in times if c != self.best]
        took = sum(self._ahead.seconds(self._job(c)) for c in asked)
        self.saved_s += _ALONE_RATIO * took + INDUCTOR_TIMING_S * len(asked) - seconds
        self.timed += len(asked)
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
    """What workers compile of a kernel's first wave."""
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
        for other in tuner.get_neighbour_values(name, value):
            found = copy.deepcopy(config)
            set_field(found, name, other)
            valid = getattr(tuner, "is_valid_config", None)
            if valid is None or valid(found):
                yield found


def job_of(tuner: CoordescTuner, path: str, config: LaunchConfig) -> ConfigJob:
    """What a worker is told of a config."""
    return ConfigJob(path, tuner.name, tuple(config.kwargs.items()), config.num_warps, config.num_stages)
