"""Launches beyond the trials, to find faults that show seldom, late, or after a pause only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from forecast_harness.packs.schema import Workload
from forecast_harness.verify.problems.problem import LaunchCase
from forecast_harness.verify.verdict import Reason

if TYPE_CHECKING:
    from forecast_harness.verify.judge import SolutionJudge

_SHARE_OF_TRIALS = 0.5
"""Of the seconds that the trials took, what more launches may take at least."""
_LAUNCHES_PER_PAUSE = 80
"""On average."""
_PAUSE_S = (0.05, 0.3)
_REPEATED_CASES = 4
"""Cases among which repeated launches choose, never the one before: a result that was not computed anew shows."""
_CONTESTS = 2
"""In which a solution has to be faster, before it is called so."""


def check_longer(judge: SolutionJudge, workloads: Sequence[Workload]) -> list[Reason]:
    """Check fresh launches at the sizes that are quick, until as many as planned are, or the time is up.

    The reasons of the first that shows a fault; none if all is well. Raises `CandidateFault`.
    """
    # On a machine that others use, trials take long, and so may these.
    ends = time.perf_counter() + max(judge.plan.longer_s, _SHARE_OF_TRIALS * judge.checked_launches.seconds)
    while judge.checked_launches.launches < judge.plan.launches and time.perf_counter() < ends:
        work = workloads[judge.rng.randrange(len(workloads))]
        _pause_sometimes(judge, ends)
        if reasons := judge.checked(judge.launch(judge.new_case(work.axes)), quick=True):
            return reasons
    return []


def check_timed_longer(judge: SolutionJudge, workloads: Sequence[Workload]) -> list[Reason]:
    """Check more launches that are asked for as timed ones are, for a contest's share of what is planned.

    For half of the time with fresh contents, as timed launches have them, then with some of these again, which is
    quicker. The reasons of the first that shows a fault. Raises `CandidateFault`.
    """
    began, plan = time.perf_counter(), judge.plan
    wanted = -(-plan.launches // _CONTESTS)
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


def _pause_sometimes(judge: SolutionJudge, ends: float) -> None:
    if judge.rng.random() < 1 / _LAUNCHES_PER_PAUSE:
        time.sleep(min(judge.rng.uniform(*_PAUSE_S), max(0.0, ends - time.perf_counter())))
