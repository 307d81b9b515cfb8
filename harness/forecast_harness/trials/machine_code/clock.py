"""The clock of machine code: a runner launches and times programs of which no Python runs beside it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from forecast_autotune.timing import mean_without_strays
from forecast_harness.clocks.paired_comparison import CANDIDATE, INCUMBENT
from forecast_harness.clocks.records import Program
from forecast_harness.clocks.runner.messages import (
    PAUSES,
    CheckAnswer,
    ProgramFault,
    ProgramInputs,
    RunnerFaultKind,
    TimingAnswer,
    TimingLimits,
    TimingRequest,
    Violation,
)
from forecast_harness.trials.machine_code.targets import TrialCall
from forecast_harness.verify.verdict import ContestantRejected, Reason, ReasonCode

_BLOCK = 4
"""Launches that are taken together, where they are not behind pauses."""
_MOST_STRAYS = 0.25
"""The share of a block's launches that somebody else may have held up."""

AskRunner = Callable[[Sequence[TimingRequest]], Sequence[TimingAnswer]]
"""Has a runner time programs at several calls, as `RunnerClient.time_calls` does."""


class RunnerClock:
    """A `TrialClock` over launches of two programs at all calls, which a runner times in batches.

    A time is that of launches which are taken together: behind each pause once, or some in a row. `strays`: see
    `block_means`. `implausible` says of a call and seconds why a launch cannot have taken so few; '' if it can.
    """

    def __init__(
        self,
        ask: AskRunner,
        calls: Mapping[str, TrialCall],
        programs: Mapping[str, Sequence[Program]],
        implausible: Callable[[str, float], str],
        batch: TimingLimits,
        *,
        strays: bool = True,
        checks_by_chance: Callable[[], bool] = lambda: False,
    ) -> None:
        """`programs`: the baseline's and the source's, by call. `checks_by_chance`: whether a batch that `sample` asks
        for is compared with what is right."""
        self._ask, self._calls, self._programs, self._implausible = ask, calls, programs, implausible
        self._batch, self._strays, self._checks_by_chance = batch, strays, checks_by_chance
        self._waiting: tuple[deque[float], deque[float]] = (deque(), deque())
        self.seconds: dict[tuple[int, str], list[float]] = {}
        self.checks = 0
        """Launches whose outputs were compared with what is right."""

    def place(self) -> None:
        """The runner places, loads and warms up what it launches with each batch."""

    def sample(self, which: int, fresh: bool) -> float:
        """Seconds of one launch, over calls their geometric mean. Raises `ContestantRejected`, `RunnerLost`."""
        while not self._waiting[which]:
            self._measure(compares=self._checks_by_chance())
        return self._waiting[which].popleft()

    def check(self) -> None:
        """Time a batch whose outputs are compared with what is right. Raises as `sample`."""
        self._measure(compares=True)

    def _measure(self, *, compares: bool) -> None:
        limits = self._batch if compares else replace(self._batch, checks=0)
        requests = {name: (pair, limits) for name, pair in self._programs.items()}
        means = list[list[list[float]]]()
        for name, answer in time_programs(self._ask, self._calls, requests).items():
            if wrong := self._calls[name].wrong(self._programs[name][CANDIDATE], answer.launches):
                raise ContestantRejected(CANDIDATE, [Reason(ReasonCode.WRONG_VALUES, wrong)])
            self.checks += len(answer.launches)
            means.append([block_means(s, answer.recorded, strays=self._strays) for s in answer.seconds])
            for which, blocks in enumerate(means[-1]):
                self.seconds.setdefault((which, name), []).extend(blocks)
                if problem := self._implausible(name, statistics.median(blocks)):
                    raise ContestantRejected(which, [Reason(ReasonCode.IMPOSSIBLE, problem)])
        for which in (INCUMBENT, CANDIDATE):
            for together in zip(*(one[which] for one in means), strict=False):
                self._waiting[which].append(math.exp(statistics.fmean(map(math.log, together))))


def time_programs(
    ask: AskRunner,
    calls: Mapping[str, TrialCall],
    requests: Mapping[str, tuple[Sequence[Program], TimingLimits]],
) -> dict[str, TimingAnswer]:
    """The runner's answer by call: one program alone, or two side by side of which the second is on trial.

    Raises `ContestantRejected` for a program that fails or breaks a rule, `RunnerLost`.
    """
    if not requests:
        return {}
    contestants = next(iter(requests.values()))[0]
    asked = [TimingRequest(programs, calls[n].given, limits) for n, (programs, limits) in requests.items()]
    try:
        answers = ask(asked)
    except ProgramFault as fault:
        is_first = len(contestants) > 1 and fault.candidate == contestants[INCUMBENT].candidate
        raise ContestantRejected(INCUMBENT if is_first else CANDIDATE, [_fault_reason(fault)]) from fault
    if reason := violation_reason(answers[-1].violations):
        which = answers[-1].violations[0].contestant if len(contestants) > 1 else CANDIDATE
        raise ContestantRejected(which, [reason])
    return dict(zip(requests, answers, strict=True))


def check_on_call(
    check: Callable[[Program, ProgramInputs], CheckAnswer], call: TrialCall, program: Program
) -> None:
    """The stage "right on one call". Raises `ContestantRejected` for a program that is not, `RunnerLost`.

    `check`: as `RunnerClient.check`.
    """
    try:
        answer = check(program, call.given)
    except ProgramFault as fault:
        raise ContestantRejected(CANDIDATE, [_fault_reason(fault)]) from fault
    reason = violation_reason(answer.violations)
    if reason is None and (wrong := call.wrong(program, answer.launches)):
        reason = Reason(ReasonCode.WRONG_VALUES, wrong)
    if reason is not None:
        raise ContestantRejected(CANDIDATE, [reason])


def violation_reason(violations: Sequence[Violation]) -> Reason | None:
    """The first thing that a right program does not do; None for none."""
    if not violations:
        return None
    is_outside = violations[0].rule == "out of bounds"
    code = ReasonCode.OUT_OF_BOUNDS if is_outside else ReasonCode.MUTATED_INPUT
    return Reason(code, f"{violations[0].rule}: {violations[0].detail}")


def _fault_reason(fault: ProgramFault) -> Reason:
    code = ReasonCode.TIMEOUT if fault.kind is RunnerFaultKind.HANG else ReasonCode.FAILS
    return Reason(code, fault.detail[:2000])


def block_means(seconds: Sequence[float], recorded: bool, *, strays: bool = True) -> list[float]:
    """Mean seconds of launches that are taken together: behind each pause once where `recorded`, or some in a row.

    `strays`: launches far above a block's median count, too. Few blocks cannot do with those that somebody else on
    the host or the device has held up; what is proven by many needs them, as a source may be slow now and then.
    """
    size = PAUSES if recorded else min(_BLOCK, len(seconds))
    mean = statistics.fmean if strays else _mean_of_usual
    return [mean(seconds[n : n + size]) for n in range(0, len(seconds) - size + 1, size)]


def _mean_of_usual(seconds: Sequence[float]) -> float:
    """The mean without strays, of which there are a few at the most: a source that is often slow is slow."""
    most = sorted(seconds)[: len(seconds) - int(_MOST_STRAYS * len(seconds))]
    return max(mean_without_strays(seconds), statistics.fmean(most))
