"""When each compilation and each timing of a decision ended, taken from outside while the tuner works.

A replay of decisions under another plan needs to know how long each part took, and what went on at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import wraps
from typing import Any


class ProgressTimes:
    """Notes of the decision that is being made: seconds since its start. One at a time, in this process."""

    def __init__(self) -> None:
        self._begin = 0.0
        self.compiled: list[list[Any]] = []
        """[config as text, begun, ended] of compilations in children."""
        self.timed: list[list[Any]] = []
        """[config as text, ended, seconds of timing so far] of measurements."""

    def start(self) -> None:
        """Forget what was noted: a decision begins."""
        self._begin = time.perf_counter()
        self.compiled, self.timed = [], []

    def watch(self) -> None:
        """Put notes into our compile pool and measurer. What this release has not is left out."""
        from forecast_integrations.triton.compile import pool
        from forecast_integrations.triton.timer.measurer import TritonMeasurer

        measure = TritonMeasurer.measure

        @wraps(measure)
        def noting_measure(measurer: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
            for answer in measure(measurer, *args, **kwargs):
                spent = measurer.spent().timing_s
                self.timed.append([str(answer.candidate.config), self._now(), round(spent, 4)])
                yield answer

        measurer_class: Any = TritonMeasurer
        measurer_class.measure = noting_measure
        pool: Any = pool.ForkPool
        if result := getattr(pool, "_result", None):

            @wraps(result)
            def noting_result(self_: Any, child: Any, *args: Any, **kwargs: Any) -> Any:
                config = getattr(child.tag, "config", None)
                if config is not None:
                    begun = round(getattr(child, "began", self._begin) - self._begin, 4)
                    self.compiled.append([str(config), begun, self._now()])
                return result(self_, child, *args, **kwargs)

            pool._result = noting_result

    def _now(self) -> float:
        return round(time.perf_counter() - self._begin, 4)

    def to_json(self) -> dict[str, Any]:
        """Both lists."""
        return {"compiled": self.compiled, "timed": self.timed}
