"""What a window costs around a launch: asked of cells that hold no candidate."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

from forecast_harness.targets.packs.schema import Language, PackFormat
from forecast_harness.verify.launches.windowed_launcher import WindowedCell, WindowedLauncher
from forecast_harness.verify.problems.problem import LaunchCase

_REMEMBERED_WINDOWS = 31
_NATIVE_SECONDS = 5e-6
"""What an answer in machine code may save against the trusted cell's lightest one."""


class NullCell:
    """Trusted cells that are asked what contestants are asked: one whose launches do nothing, one that does nothing.

    The first one's windows have all that a launch's have: resuming, the question, the code that serves a
    launch, the answer, stopping. The second answers at once: what its windows take, nobody can do without. No
    candidate can make them longer, since all are stopped meanwhile.
    """

    def __init__(self, cell: WindowedCell, bare: WindowedCell, rng: random.Random) -> None:
        self._launcher = WindowedLauncher(cell, PackFormat.OWN, rng)
        self._launcher.prepare("", "", Language.TORCH)
        self._bare = bare
        bare.ask("forecast_harness.verify.bare_answers:serve", {}, {})
        bare.freeze()
        self._windows: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED_WINDOWS))
        self._bare_windows: deque[float] = deque(maxlen=_REMEMBERED_WINDOWS)

    def measure(self, name: str, case: LaunchCase, returned: Sequence[Mapping[str, Any]]) -> float:
        """Seconds of one window of the workload `name`, where contestants return tensors of these forms."""
        self._bare_windows.append(
            self._bare.ask_in_window("forecast_harness.verify.inside:window", {}).seconds
        )
        seconds = self._launcher.null_window(case, returned)
        self._windows[name].append(seconds)
        return seconds

    def forget(self) -> None:
        """Begin anew: windows before were of cells that were not yet warm."""
        self._windows.clear()
        self._bare_windows.clear()

    def typical_seconds(self, name: str) -> float:
        """The median of a workload's latest windows; 0 where there are none."""
        found = self._windows[name]
        return statistics.median(found) if found else 0.0

    def undisturbed_seconds(self, name: str) -> float:
        """What a workload's windows take where nothing else wants the processor; 0 where there are none."""
        return _low(self._windows[name])

    def serving_seconds(self, name: str) -> float:
        """What whoever replaced all of the code that serves a launch of `name` could gain, at most.

        A busy machine delays windows by more than that code takes: those that it did not delay tell.
        """
        return max(0.0, self.undisturbed_seconds(name) - _low(self._bare_windows)) + _NATIVE_SECONDS


def _low(seconds: Sequence[float] | deque[float]) -> float:
    """The 20 % quantile; 0 of none."""
    ordered = sorted(seconds)
    return ordered[len(ordered) // 5] if ordered else 0.0
