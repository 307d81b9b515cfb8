"""Launches beyond the trials, to find faults that show seldom, late, or after a pause only."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from forecast_harness.targets.packs.schema import Workload
from forecast_harness.verify.checked_launches import CheckedLaunches
from forecast_harness.verify.launches.launcher import LaunchResult
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.problems.problem import LaunchCase
from forecast_harness.verify.verdict import Reason

_SHARE_OF_TRIALS = 0.5
"""Of the seconds that the trials took on a host, what more launches may take at least."""
_VERIFICATION_S, _LEAST_ON_DEVICE_S = 1.9, 0.2
"""Seconds of a verification on a device within which there is time for more launches, and what they have at least."""
_LAUNCHES_PER_PAUSE = 80
"""On average."""
_PAUSE_S = (0.05, 0.3)
_REPEATED_CASES = 4
"""Cases among which repeated launches choose, never the one before: a result that was not computed anew shows."""
_CONTESTS = 2
"""In which a solution has to be faster, before it is called so."""


class LaunchJudge(Protocol):
    """What is asked of a `SolutionJudge`; see there."""

    plan: VerificationPlan
    rng: random.Random
    ends: float
    """When the last check has to begin, by `time.perf_counter`: the cell's time is limited."""

    @property
    def checked_launches(self) -> CheckedLaunches:
        """Launches that were compared with the reference so far."""

    def new_case(self, axes: Mapping[str, Any] | None) -> LaunchCase:
        """Fresh arguments."""

    def timed_case(self, work: Workload) -> LaunchCase:
        """Fresh arguments of a workload, as they are timed."""

    def launch(self, case: LaunchCase) -> LaunchResult:
        """One launch."""

    def timed(self, case: LaunchCase) -> LaunchResult:
        """One launch as it is timed."""

    def checked(
        self, reply: LaunchResult, work: Workload | None = None, *, quick: bool = False
    ) -> list[Reason]:
        """The reasons of a launch, its values compared to the reference, too."""


def check_longer(judge: LaunchJudge, workloads: Sequence[Workload]) -> list[Reason]:
    """Check fresh launches at the sizes that are quick, until as many as planned are, or the time is up.

    The reasons of the first that shows a fault; none if all is well. Raises `CandidateFault`.
    """
    more = judge.plan.longer_s
    if judge.plan.device == "cpu":  # that others use: trials take long, and so may these
        more = max(more, _SHARE_OF_TRIALS * judge.checked_launches.seconds)
    else:
        more = max(_LEAST_ON_DEVICE_S, min(more, _VERIFICATION_S - judge.checked_launches.seconds))
    ends = min(judge.ends, time.perf_counter() + more)
    while judge.checked_launches.launches < judge.plan.launches and time.perf_counter() < ends:
        work = workloads[judge.rng.randrange(len(workloads))]
        _pause_sometimes(judge, ends)
        if reasons := judge.checked(judge.launch(judge.new_case(work.axes)), quick=True):
            return reasons
    return []


def check_timed_longer(judge: LaunchJudge, workloads: Sequence[Workload]) -> list[Reason]:
    """Check more launches that are asked for as timed ones are, for a contest's share of what is planned.

    For half of the time with fresh contents, as timed launches have them, then with some of these again, which is
    quicker. The reasons of the first that shows a fault. Raises `CandidateFault`.
    """
    began, plan = time.perf_counter(), judge.plan
    wanted = -(-plan.contest_launches // _CONTESTS)
    kept: dict[str, list[LaunchCase]] = {work.name: [] for work in workloads}
    last: LaunchCase | None = None
    while judge.checked_launches.launches < wanted:
        spent = time.perf_counter() - began
        if spent > plan.longer_timed_s:
            break
        work = workloads[judge.rng.randrange(len(workloads))]
        cases = kept[work.name]
        others = [case for case in cases if case is not last]
        _pause_sometimes(judge, began + plan.longer_timed_s)
        fresh = len(others) < 2 or spent < plan.longer_timed_s / 2
        if fresh:
            last = judge.timed_case(work)
            cases[:] = [*cases, last][-_REPEATED_CASES:]
        else:
            last = others[judge.rng.randrange(len(others))]
        reply = judge.timed(last)
        reasons = judge.checked(reply, work) if fresh else judge.checked(reply, quick=True)
        if reasons:
            return reasons
    return []


def _pause_sometimes(judge: LaunchJudge, ends: float) -> None:
    if judge.rng.random() < 1 / _LAUNCHES_PER_PAUSE:
        time.sleep(min(judge.rng.uniform(*_PAUSE_S), max(0.0, ends - time.perf_counter())))
