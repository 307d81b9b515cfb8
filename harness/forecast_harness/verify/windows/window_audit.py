"""Whether the judge's own clock agrees that a candidate is faster, where another clock has said so.

On a device, launches are timed inside the contestants' own processes: nothing else is fine enough for a few
microseconds, and nothing else can be lied with so easily. So a candidate that is faster by that clock is launched
once more beside the incumbent, many times in each of many windows that the judge alone clocks (see
`launch_batches`), until these agree, contradict, or take too long.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from forecast_harness.clocks.paired_comparison import CANDIDATE, INCUMBENT, sign_interval

NULL, BARE = 2, 3
"""Cells without a candidate: one whose launches do nothing, and one that answers at once."""
_WARM_UP_ROUNDS, _FEWEST_ROUNDS, _ROUNDS_PER_LOOK = 3, 20, 5
_CONFIDENCE = 0.99
_CONTRADICTED_SHARE = 0.25
"""Of the claimed gain: what windows that show less than it with confidence say that it is none."""
_NATIVE_S = 5e-6
"""What an answer in machine code may save against the trusted cell's lightest one."""
_LEAST_SHARE = 0.02
"""Of a window: what launches take at least, so that a logarithm can be taken."""


class AuditVerdict(StrEnum):
    """What the judge's clock says of a gain."""

    AGREES = "agrees"
    CONTRADICTS = "contradicts"
    UNCLEAR = "unclear"


class AuditUnavailable(Exception):
    """Windows could not be clocked; the text says why. It is nobody's fault."""


class ClockedCells(Protocol):
    """Windows of all four cells, of each workload."""

    @property
    def workloads(self) -> Sequence[str]:
        """Their names."""

    def window(self, which: int, workload: str) -> float:
        """Seconds of one window. Raises `AuditRejected`, `AuditUnavailable`."""

    def check_outputs(self) -> None:
        """Compare what some of the candidate's windows put out with what is right. Raises `AuditRejected`."""


@dataclass
class WindowAudit:
    """Rounds of windows, and what they amount to."""

    claimed: float
    """The gain by the other clock: natural log of the ratio of times."""
    margin: float
    """A gain below this does not count."""
    windows: dict[tuple[int, str], list[float]] = field(default_factory=dict)
    seconds: float = 0.0

    def run(self, cells: ClockedCells, rng: random.Random, most_rounds: int, most_s: float) -> AuditVerdict:
        """Window after window, until the verdict is clear or so many rounds or seconds are spent."""
        began = time.perf_counter()
        for n in range(_WARM_UP_ROUNDS + most_rounds):
            self._add_round(cells, rng)
            if n + 1 == _WARM_UP_ROUNDS:
                self.windows.clear()
            self.seconds = time.perf_counter() - began
            rounds = n + 1 - _WARM_UP_ROUNDS
            is_over = self.seconds > most_s
            if rounds < _FEWEST_ROUNDS or (rounds % _ROUNDS_PER_LOOK and not is_over):
                continue
            if self.verdict() is not AuditVerdict.UNCLEAR or is_over:
                break
        found = self.verdict()
        if found is AuditVerdict.AGREES:
            cells.check_outputs()
        return found

    def _add_round(self, cells: ClockedCells, rng: random.Random) -> None:
        for name in cells.workloads:
            order = [INCUMBENT, CANDIDATE, NULL, BARE]
            rng.shuffle(order)
            for which in order:
                self.windows.setdefault((which, name), []).append(cells.window(which, name))

    def verdict(self) -> AuditVerdict:
        """What all rounds so far say."""
        low, high = sign_interval(self.differences(), _CONFIDENCE)
        if low > self.margin + self.serving_gain():
            return AuditVerdict.AGREES
        if high < _CONTRADICTED_SHARE * self.claimed:
            return AuditVerdict.CONTRADICTS
        return AuditVerdict.UNCLEAR

    @property
    def gain(self) -> float:
        """Natural log of the ratio of times, by the windows."""
        return statistics.median(self.differences())

    def differences(self) -> list[float]:
        """By round, the mean over workloads of the log of the incumbent's over the candidate's net seconds."""
        logs = []
        for name in self._names:
            idle = statistics.median(self.windows[NULL, name])
            pairs = zip(self.windows[INCUMBENT, name], self.windows[CANDIDATE, name], strict=True)
            logs.append([math.log(_net(theirs, idle) / _net(own, idle)) for theirs, own in pairs])
        return [statistics.fmean(one) for one in zip(*logs, strict=True)]

    def serving_gain(self) -> float:
        """What whoever replaced all code that serves a window could gain, as a natural log; see `NullCell`."""
        logs = []
        for name in self._names:
            null, bare = (sorted(self.windows[which, name]) for which in (NULL, BARE))
            saved = max(0.0, null[len(null) // 5] - bare[len(bare) // 5]) + _NATIVE_S
            theirs = statistics.median(self.windows[INCUMBENT, name])
            left = 1 - saved / _net(theirs, statistics.median(null))
            logs.append(-math.log(left) if left > 0 else math.inf)
        return statistics.fmean(logs)

    @property
    def _names(self) -> list[str]:
        return sorted({name for _, name in self.windows})

    def to_json(self) -> Mapping[str, object]:
        """For a verdict's facts."""
        low, high = sign_interval(self.differences(), _CONFIDENCE)
        return {
            "verdict": str(self.verdict()),
            "claimed": round(self.claimed, 5),
            "gain": round(self.gain, 5),
            "interval": [round(low, 5), round(high, 5)],
            "serving": round(min(self.serving_gain(), 99.0), 5),
            "rounds": len(self.differences()),
            "seconds": round(self.seconds, 2),
            "windows_us": {
                f"{which}:{name}": round(1e6 * statistics.median(found), 1)
                for (which, name), found in sorted(self.windows.items())
            },
        }


def _net(window_s: float, idle_s: float) -> float:
    return max(window_s - idle_s, _LEAST_SHARE * window_s)
