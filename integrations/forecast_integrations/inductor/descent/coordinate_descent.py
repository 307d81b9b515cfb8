"""Where Inductor's coordinate descent over a generated kernel's config may go next, and what is compiled for it.

The descent is Inductor's own: one field after the other, by a step up or down, on from whatever is faster.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from forecast_integrations.inductor.descent.config_worker import ConfigJob
from forecast_integrations.inductor.descent.configs_ahead import ConfigsAhead
from forecast_integrations.inductor.inductor_seconds import RECOMPILE_RATIO
from forecast_integrations.triton.protocols import LaunchConfig

if TYPE_CHECKING:
    from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

_IMPROVES = 0.999
"""Below this share of the best time so far, coordinate descent goes on from a config."""


class Descent:
    """One kernel's descent: which configs it has timed, and which it may ask for next."""

    def __init__(self, ahead: ConfigsAhead, kernel: CachingAutotuner, begin: LaunchConfig) -> None:
        self._ahead, self._tuner, self._path = ahead, kernel.coordesc_tuner, str(kernel.filename)
        self._best_ms = math.inf
        self.timed = 0
        self.saved_s = 0.0
        """Seconds that this process would have compiled, less those that it waited for workers."""
        self._compile_next(begin)

    def before(self, config: LaunchConfig) -> None:
        """A config is about to be timed."""
        took, waited = self._ahead.wait(job_of(self._tuner, self._path, config))
        self.saved_s += RECOMPILE_RATIO * took - waited

    def after(self, config: LaunchConfig, ms: float) -> None:
        """A config has been timed."""
        self.timed += 1
        if ms < self._best_ms * _IMPROVES:
            self._best_ms = ms
            self._compile_next(config)

    def end(self) -> None:
        """The kernel is decided: what it has not asked for is not needed."""
        self._ahead.forget(self._path)

    def _compile_next(self, config: LaunchConfig) -> None:
        timed = self._tuner.lookup_in_cache
        there = [c for c in neighbours(self._tuner, config) if timed(c) is None]
        self._ahead.add([job_of(self._tuner, self._path, c) for c in there], urgent=True)


def first_jobs(kernel: CachingAutotuner) -> list[ConfigJob]:
    """Where a descent may go first, from any of the configs that the kernel begins with."""
    tuner, path = kernel.coordesc_tuner, str(kernel.filename)
    begins = [launcher.config for launcher in kernel.launchers]
    there = {job_of(tuner, path, config) for config in begins}
    found = (job_of(tuner, path, c) for config in begins for c in neighbours(tuner, config))
    return [job for job in dict.fromkeys(found) if job not in there]


def neighbours(tuner: CoordescTuner, config: LaunchConfig) -> Iterator[LaunchConfig]:
    """The configs that differ from this one by a step of one field, in the descent's order."""
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
