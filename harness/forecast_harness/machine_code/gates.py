"""Sources judged in order of price: each gate is passed by those that may still win, and costs more than the last.

Text and novelty, forecast, compilation of one config, one small case, time against the incumbent's, more configs,
a race beside the incumbent, full verification. The device never waits while a source is compiled: compilations
run ahead on all processors. Nothing becomes the incumbent before it was verified in full.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from forecast_autotune.records import Outcome
from forecast_autotune.timing.pauses import mean_without_strays
from forecast_harness.machine_code.compile_workers import BuildRequest, BuildResult, CallCase
from forecast_harness.machine_code.gate_records import (
    Gate,
    GateCounts,
    GateRules,
    LaunchOptions,
    ProposedSource,
    SourceVerdict,
)
from forecast_harness.machine_code.records import Program
from forecast_harness.machine_code.runner.client import (
    ObservedLaunch,
    ProgramFault,
    ProgramInputs,
    RunnerClient,
    RunnerFaultKind,
    RunnerLost,
)
from forecast_harness.machine_code.runner.session import TimingLimits, Violation


class SourceBuilder(Protocol):
    """Compiles, as `CompileWorkers` does."""

    count: int

    def submit(self, request: BuildRequest) -> Future[BuildResult]:
        """Compile on the next free worker."""


class TrialCall(Protocol):
    """A call with known outputs, as `PreparedCall` is."""

    @property
    def arguments(self) -> CallCase:
        """What is compiled for."""

    @property
    def given(self) -> ProgramInputs:
        """What is launched on."""

    def wrong(self, program: Program, launches: Sequence[ObservedLaunch]) -> str:
        """What is wrong with these outputs; '' for nothing."""


class SourceGates:
    """Judges sources against an incumbent.

    `small` is a call that is checked, `timed` one that is timed. `repeats` names what a source repeats, or '';
    `promise` is the probability that a source beats the incumbent, told from a forecast; `verify` verifies one
    source in one config in full, in fresh processes, and says what is wrong, or ''.
    """

    def __init__(
        self,
        builder: SourceBuilder,
        runner: RunnerClient,
        entry: str,
        small: TrialCall,
        timed: TrialCall,
        *,
        verify: Callable[[ProposedSource, LaunchOptions], str],
        repeats: Callable[[ProposedSource], str] = lambda source: "",
        promise: Callable[[ProposedSource], float] = lambda source: 1.0,
        least_promise: float = 0.0,
        progress: Callable[[GateCounts], None] = lambda counts: None,
        rules: GateRules | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._builder, self._runner, self._entry = builder, runner, entry
        self._small, self._timed_call = small, timed
        self._verify, self._repeats, self._promise = verify, repeats, promise
        self._least_promise, self._progress = least_promise, progress
        self._rules, self._clock = rules or GateRules(), clock
        self._counts, self._began = GateCounts(), clock()
        self._device = threading.Lock()
        """Held by whoever uses the device: what verification does there meanwhile would be in a time."""
        self.incumbent: Program | None = None
        """The fastest verified program, at the timed call's sizes."""
        self.incumbent_s = 0.0
        """Its seconds."""

    @property
    def counts(self) -> GateCounts:
        """So far."""
        return replace(self._counts, seconds=self._clock() - self._began)

    def _count(self, **more: int) -> None:
        self._counts = replace(self._counts, **{n: getattr(self._counts, n) + m for n, m in more.items()})
        self._progress(self.counts)

    def seed(self, source: ProposedSource) -> SourceVerdict:
        """Make a source the incumbent, verified and in its best config. Raises `RunnerLost`."""
        (verdict,) = list(self.judge([source]))
        return verdict

    def judge(self, sources: Iterable[ProposedSource]) -> Iterator[SourceVerdict]:
        """Verdicts in the order in which they are reached. Raises `RunnerLost` where the device is lost."""
        waiting = iter(sources)
        # One thread for the device, and one for verification, which has a sandbox of its own.
        with ThreadPoolExecutor(1, "runner") as device, ThreadPoolExecutor(1, "verify") as verifier:
            trials: dict[Future[Any], _Trial] = {}
            more = True
            while more or trials:
                while (
                    more and len({id(t) for t in trials.values()}) < self._rules.ahead * self._builder.count
                ):
                    proposed = next(waiting, None)
                    if proposed is None:
                        more = False
                        break
                    self._count(proposed=1)
                    if early := self._early(proposed):
                        self._count(judged=1)
                        yield early
                        continue
                    trial = _Trial(proposed)
                    trials[self._build(trial, 0)] = trial
                done, _ = wait(trials, timeout=self._rules.progress_s, return_when=FIRST_COMPLETED)
                if not done:
                    self._progress(self.counts)
                for future in done:
                    trial = trials.pop(future)
                    for following in self._next(trial, future.result(), device, verifier):
                        trials[following] = trial
                    if trial.verdict is not None and trial not in trials.values():
                        self._count(judged=1)
                        yield trial.verdict

    def _early(self, source: ProposedSource) -> SourceVerdict | None:
        if said := self._repeats(source):
            self._count(repeated=1)
            return SourceVerdict(source.name, Gate.NOVELTY, Outcome.OK, f"repeats {said}")
        if self.incumbent is not None and self._promise(source) < self._least_promise:
            self._count(unpromising=1)
            return SourceVerdict(source.name, Gate.FORECAST, Outcome.OK, "it is not expected to win")
        return None

    def _build(self, trial: _Trial, config: int) -> Future[Any]:
        cases = (self._small.arguments, self._timed_call.arguments)
        options = trial.source.configs[config]
        request = BuildRequest(trial.source.name, trial.source.source, self._entry, cases, options)
        trial.building += 1
        return self._builder.submit(request)

    # --- one step of a source ---

    def _next(
        self, trial: _Trial, result: Any, device: ThreadPoolExecutor, verifier: ThreadPoolExecutor
    ) -> list[Future[Any]]:
        """What is to be done after a step; nothing where the verdict is there, or others are under way."""
        if isinstance(result, BuildResult):
            trial.building -= 1
            return self._built(trial, result, device)
        if isinstance(result, _Launched):
            trial.launching -= 1
            return self._launched(trial, result, device, verifier)
        return self._verified(trial, result)

    def _built(self, trial: _Trial, result: BuildResult, device: ThreadPoolExecutor) -> list[Future[Any]]:
        if result.infrastructure:
            return self._settle(trial, Gate.COMPILE, Outcome.INFRASTRUCTURE, result.infrastructure, device)
        if result.host_code:
            trial.host_code = True
            return self._settle(trial, Gate.COMPILE, Outcome.OK, result.host_code, device)
        if result.error:
            return self._settle(trial, Gate.COMPILE, Outcome.COMPILE_ERROR, result.error, device)
        self._count(compiled=1)
        trial.launching += 1
        return [device.submit(self._launch, trial, result)]

    def _launched(
        self, trial: _Trial, found: _Launched, device: ThreadPoolExecutor, verifier: ThreadPoolExecutor
    ) -> list[Future[Any]]:
        self._count(checked=found.checked, timed=found.timed, faults=found.faulted)
        if found.gate is Gate.RACE:
            if found.outcome is Outcome.OK and not found.detail:
                return [verifier.submit(self._verified_in_full, trial)]
            return self._settle(trial, Gate.RACE, found.outcome, found.detail, device)
        trial.timed += found.timed
        if found.timed and (trial.program is None or found.seconds < trial.seconds):
            trial.program, trial.seconds, trial.config = found.program, found.seconds, found.config
        first, trial.expanded = not trial.expanded, True
        # Where the first config is wrong or far from winning, the others are not worth their compilation.
        if first and found.outcome is Outcome.OK and not found.detail and len(trial.source.configs) > 1:
            return [self._build(trial, n) for n in range(1, len(trial.source.configs))]
        return self._settle(trial, found.gate, found.outcome, found.detail, device)

    def _settle(
        self, trial: _Trial, gate: Gate, outcome: Outcome, detail: str, device: ThreadPoolExecutor
    ) -> list[Future[Any]]:
        """Once nothing of a source is under way: race its best config if that may win, else end.

        One config's failure ends a source only where no other one ran.
        """
        if trial.building or trial.launching:
            return []
        if gate not in (Gate.RACE, Gate.VERIFY) and trial.program is not None:
            if self._may_win(trial):
                trial.launching += 1
                return [device.submit(self._race, trial)]
            if outcome is not Outcome.OK:
                outcome, detail = Outcome.OK, f"one config failed: {detail}"
            gate = Gate.CONFIGS if trial.timed > 1 else gate
        return self._end(trial, gate, outcome, detail)

    def _may_win(self, trial: _Trial) -> bool:
        return not self.incumbent_s or trial.seconds < self.incumbent_s * (1 - self._rules.gain)

    def _verified(self, trial: _Trial, wrong: str) -> list[Future[Any]]:
        if wrong:
            return self._end(trial, Gate.VERIFY, Outcome.INCORRECT, wrong)
        self._count(verified=1)
        if self._may_win(trial):  # another one may have been verified meanwhile
            self.incumbent, self.incumbent_s, trial.incumbent = trial.program, trial.seconds, True
        return self._end(trial, Gate.VERIFY, Outcome.OK, "")

    def _end(self, trial: _Trial, gate: Gate, outcome: Outcome, detail: str) -> list[Future[Any]]:
        trial.verdict = SourceVerdict(
            trial.source.name,
            gate,
            outcome,
            detail,
            trial.host_code,
            trial.seconds,
            trial.config,
            trial.timed,
            trial.incumbent,
        )
        return []

    # --- on the device ---

    def _verified_in_full(self, trial: _Trial) -> str:
        with self._device:
            return self._verify(trial.source, trial.config)

    def _launch(self, trial: _Trial, built: BuildResult) -> _Launched:
        """Check the small call, then time the other one against the incumbent's seconds."""
        with self._device:
            return self._launch_alone(built)

    def _launch_alone(self, built: BuildResult) -> _Launched:
        small, timed = built.programs
        options = built.request.options
        try:
            answer = self._runner.check(small, self._small.given)
            if said := first_violation(answer.violations) or self._small.wrong(small, answer.launches):
                return _Launched(Gate.CHECK, Outcome.INCORRECT, said, checked=1)
            bound = self.incumbent_s * self._rules.worse
            found = self._runner.time([timed], self._timed_call.given, TimingLimits(bound_s=bound))
            if said := first_violation(found.violations) or self._timed_call.wrong(timed, found.launches):
                return _Launched(Gate.TIME, Outcome.INCORRECT, said, checked=1)
        except ProgramFault as fault:
            return _Launched(Gate.CHECK, FAULT_OUTCOMES[fault.kind], fault.detail, faulted=1)
        except RunnerLost as lost:
            return _Launched(Gate.CHECK, Outcome.INFRASTRUCTURE, str(lost), faulted=1)
        seconds = mean_without_strays(found.seconds[0])
        return _Launched(Gate.TIME, Outcome.OK, found.stopped, timed, seconds, options, checked=1, timed=1)

    def _race(self, trial: _Trial) -> _Launched:
        """Time the best config beside the incumbent."""
        with self._device:
            return self._race_alone(trial)

    def _race_alone(self, trial: _Trial) -> _Launched:
        program, incumbent = trial.program, self.incumbent
        if program is None:
            raise AssertionError("a race needs a program that was timed")
        if incumbent is None:
            return _Launched(Gate.RACE, Outcome.OK, "", program, trial.seconds, trial.config)
        try:
            found = self._runner.time([incumbent, program], self._timed_call.given, TimingLimits())
            if said := first_violation(found.violations) or self._timed_call.wrong(program, found.launches):
                return _Launched(Gate.RACE, Outcome.INCORRECT, said, checked=1)
        except ProgramFault as fault:
            if fault.candidate != program.candidate:
                detail = f"the incumbent failed beside it: {fault.detail}"
                return _Launched(Gate.RACE, Outcome.INFRASTRUCTURE, detail, faulted=1)
            return _Launched(Gate.RACE, FAULT_OUTCOMES[fault.kind], fault.detail, faulted=1)
        except RunnerLost as lost:
            return _Launched(Gate.RACE, Outcome.INFRASTRUCTURE, str(lost), faulted=1)
        theirs, mine = (mean_without_strays(s) for s in found.seconds)
        slow = (
            ""
            if mine < theirs * (1 - self._rules.gain)
            else f"{mine:.3g} s beside the incumbent's {theirs:.3g} s"
        )
        return _Launched(Gate.RACE, Outcome.OK, found.stopped or slow, checked=1)


FAULT_OUTCOMES = {
    RunnerFaultKind.HANG: Outcome.TIMEOUT,
    RunnerFaultKind.DEVICE_ERROR: Outcome.RUNTIME_ERROR,
    RunnerFaultKind.CRASH: Outcome.RUNTIME_ERROR,
    RunnerFaultKind.REFUSED: Outcome.OUT_OF_RESOURCES,
}
"""The label of a program that did this."""


def first_violation(violations: Sequence[Violation]) -> str:
    """The first thing that a right program does not do, in words; '' for none."""
    return f"{violations[0].rule}: {violations[0].detail}" if violations else ""


@dataclass(eq=False)
class _Trial:
    """A source on its way."""

    source: ProposedSource
    building: int = 0
    launching: int = 0
    expanded: bool = False
    timed: int = 0
    program: Program | None = None
    seconds: float = 0.0
    config: LaunchOptions = field(default_factory=dict)
    host_code: bool = False
    incumbent: bool = False
    verdict: SourceVerdict | None = None


@dataclass(frozen=True)
class _Launched:
    """What the device said of one config, or of a race."""

    gate: Gate
    outcome: Outcome
    detail: str = ""
    program: Program | None = None
    seconds: float = 0.0
    config: LaunchOptions = field(default_factory=dict)
    checked: int = 0
    timed: int = 0
    faulted: int = 0
