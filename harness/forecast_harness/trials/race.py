"""The timing that a search spends on one candidate; loads no torch, so that callers need not."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from forecast_autotune.records.codec import Record
from forecast_harness.clocks.paired_comparison import CANDIDATE, INCUMBENT, sign_interval
from forecast_harness.sandbox.api import JobResult, ResourceLimits, SandboxJob, SandboxLane

Call = TypeVar("Call", bound=Hashable)


@dataclass(frozen=True)
class RaceRules(Record, label="rules"):
    """Rules on the end of timing. A block is four launches of every workload, as in `measure_block`."""

    rung: int = 2
    """Blocks per config in the first round of a race; each further round has twice as many."""
    first: int = 3
    """Blocks after which a hopeless candidate is dropped."""
    least: int = 8
    most: int = 40
    hopeless: float = math.log(1.3)
    """Natural log of a slowdown, in every one of the first blocks."""
    alpha: float = 0.05
    precise: float = 0.004
    """Standard error of log2(time ratio) that is good enough."""
    seconds: float = 20.0
    """Most seconds of launches, after the race, of both sides together."""
    wall: float = 600.0
    """Most seconds of the same by the clock: what lies between short launches takes longer than they do."""


QUICK_RULES = RaceRules()
"""A cheap estimate: promising candidates are confirmed afterwards."""
HOST_RULES = RaceRules(most=16)
"""The same on a host, where what lies between launches takes longer than they do and others compute, too: a source that
is far ahead has shown that in so many blocks, and one that is not is not waited for."""
THOROUGH_RULES = RaceRules(least=20, most=120, precise=0.002, seconds=60.0)


def standard_error(differences: Sequence[float]) -> float:
    """The standard error of their median: half of the distribution-free interval that holds it with probability
    0.68."""
    low, high = sign_interval(differences, 0.6827)
    return (high - low) / 2


def log2_ratio(differences: Sequence[float]) -> tuple[float, float]:
    """(log2 of candidate's over incumbent's time, its standard error) from a contest's blocks.

    `differences`: natural log of incumbent's over candidate's time, one per block.
    """
    scale = 1 / math.log(2)
    return -statistics.median(differences) * scale, standard_error(differences) * scale


def mean_log2_ratio(calls: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The same over several calls that were timed apart: the mean of their ratios, and its standard error.

    Each call has a median of its own: what strays in a few blocks of each would be in most blocks of all together.
    """
    ratios = [log2_ratio(differences) for differences in calls]
    error = math.hypot(*(error_of_call for _, error_of_call in ratios)) / len(ratios)
    return statistics.fmean(ratio for ratio, _ in ratios), error


def drift_corrected_seconds(
    samples: Mapping[tuple[int, Call], Sequence[float]], incumbent: Mapping[Call, float]
) -> dict[Call, float]:
    """A contestant's seconds by call, as they would be where the incumbent takes these.

    `samples` are seconds of both sides, (side, call), from the contestant's own blocks: the ratio of their
    medians counts, so that drift between contestants of one race does not.
    """
    middle = {key: statistics.median(times) for key, times in samples.items()}
    return {n: s * middle[CANDIDATE, n] / middle[INCUMBENT, n] for n, s in incumbent.items()}


HOLD = "hold"
"""The key of a race's payload that names the file whose appearance lets it go on."""
_LOOK_S = 0.005
_GIVE_UP_AGAIN_S = 0.05


def wait_to_be_let_go(payload: Mapping[str, Any]) -> None:
    """Wait where the payload says so. Runs in the judge, whose time is limited by its lane."""
    hold = payload.get(HOLD)
    while hold and not Path(hold).exists():
        time.sleep(_LOOK_S)


class PreparedRace:
    """One race that waits for `timed`. Until then it compiles and launches a few times, on a busy device, too."""

    def __init__(self, lane: SandboxLane, job: SandboxJob, limits: ResourceLimits) -> None:
        self._lane = lane
        self._folder = tempfile.TemporaryDirectory(prefix="forecast-held-race-")
        self._gate = Path(self._folder.name) / "go"
        self._result: Future[JobResult] = Future()
        waiting_job = SandboxJob(job.entry, {**job.payload, HOLD: str(self._gate)}, job.files)
        self._running = Thread(target=self._run, args=(waiting_job, limits), name="held-race", daemon=True)
        self._running.start()

    def _run(self, job: SandboxJob, limits: ResourceLimits) -> None:
        try:
            self._result.set_result(self._lane.run(job, limits))
        except BaseException as error:
            self._result.set_exception(error)

    def timed(self) -> JobResult:
        """Let it go on; its result. Raises what the lane raises."""
        self._gate.touch()
        return self._result.result()

    def close(self) -> None:
        """End it, if it has not ended: nobody will ask for its result any more. The lane stays open."""
        while wait([self._result], 0.0).not_done:
            self._lane.give_up()  # again, as the first call misses a lane that is about to begin its job
            wait([self._result], _GIVE_UP_AGAIN_S)
        self._running.join()
        self._folder.cleanup()
