"""What a window costs around a launch: asked of a cell that holds no candidate."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

from forecast_harness.packs.schema import Language, PackFormat
from forecast_harness.verify.launches.windowed_launcher import WindowedCell, WindowedLauncher
from forecast_harness.verify.problems.problem import LaunchCase

_REMEMBERED_WINDOWS = 31


class NullCell:
    """A trusted cell that is asked what contestants are asked, and whose launches do nothing.

    Its windows have all that a launch's have: resuming, the question, the copy of the outputs, the answer,
    stopping. No candidate can make them longer, since all are stopped meanwhile.
    """

    def __init__(self, cell: WindowedCell, rng: random.Random) -> None:
        self._launcher = WindowedLauncher(cell, PackFormat.OWN, rng)
        self._launcher.prepare("", "", Language.TORCH)
        self._windows: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED_WINDOWS))

    def measure(self, name: str, case: LaunchCase, returned: Sequence[Mapping[str, Any]]) -> float:
        """Seconds of one window of the workload `name`, where contestants return tensors of these forms."""
        seconds = self._launcher.null_window(case, returned)
        self._windows[name].append(seconds)
        return seconds

    def forget(self) -> None:
        """Begin anew: windows before were of a cell that was not yet warm."""
        self._windows.clear()

    def typical_seconds(self, name: str) -> float:
        """The median of a workload's latest windows; 0 where there are none."""
        found = self._windows[name]
        return statistics.median(found) if found else 0.0
