"""The configs of one node, timed until its best is known: as few are compiled, and for as few calls, as tell that."""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from forecast_autotune.records import Outcome
from forecast_harness.clocks.compilation.requests import BuildRequest, BuildResult
from forecast_harness.clocks.compilation.workers import CompileWorkers
from forecast_harness.clocks.paired_comparison import INCUMBENT
from forecast_harness.clocks.records import Program
from forecast_harness.clocks.runner.messages import PAUSES, ProgramFault, RunnerFaultKind, TimingLimits
from forecast_harness.records import Node, NodeJob
from forecast_harness.trials.judge import Trial
from forecast_harness.trials.machine_code.clock import block_means, check_on_call, time_programs
from forecast_harness.trials.machine_code.device import SharedRunner, WorkUnderWay
from forecast_harness.trials.machine_code.targets import (
    NoMachineCode,
    PathFailed,
    TargetTrials,
    TrialConfig,
)
from forecast_harness.trials.verdict import COMPILE_ERRORS, Contest, Refusal, reasons_text
from forecast_harness.verify.verdict import ContestantRejected, ReasonCode, SolutionVerdict

_HOPELESS = 1.3
"""Times the rival's seconds, at which a config is given up."""
_FAR_BEYOND = 2.0
"""Times the rival's seconds, beyond which the first config speaks for its source: no other one is compiled."""
_FIRST_CONFIGS = 2
"""Configs of which one must not be hopeless for others to be compiled; these are compiled for all calls at once."""
_BEHIND_BEST = 1.05
"""Times the seconds of the source's best config so far, at which another one is given up."""
_MOST_ALONE = PAUSES
"""Launches of a config that is timed alone, to choose among configs: a round of pauses, or two blocks without. The one
chosen is timed again beside the rival."""


class NodeTuner:
    """Compiles, checks and times configs of nodes. `tune` may be called from many threads."""

    def __init__(
        self, builds: NodeBuilds, runner: SharedRunner, trials: TargetTrials, work: WorkUnderWay
    ) -> None:
        self._builds, self._runner, self._trials, self._work = builds, runner, trials, work
        self._rival_seconds: dict[tuple[str, str], float] = {}

    def tune(self, trial: NodeTrial) -> None:
        """Time configs of a trial until its best is known: one at least is timed at all calls.

        Raises `Refusal` where none runs, `NoMachineCode`, `PathFailed`.
        """
        job, configs = trial.job, trial.configs
        # Nobody else needs them: waiting for the first to be promising would save nothing.
        ahead = max(1, min(len(configs), self._builds.idle))
        building = {n: self._begin(job, configs[n]) for n in range(ahead)}
        parts = self._time_rival(trial)
        failure = self._time_configs(trial, building, parts)
        if not trial.seconds:
            raise failure
        timed = {**trial.partly, **trial.seconds}
        self._trials.learn(
            job,
            [(configs[n], [s.get(name, math.nan) for name in trial.rivals]) for n, s in timed.items()],
            [*trial.rival_s.values()],
        )

    def programs(self, built: BuildResult, cases: Sequence[int] = ()) -> Mapping[str, Program]:
        """A config's programs by workload, right on the small call where that is one of these cases.

        Raises `Refusal`, `NoMachineCode`, `PathFailed`.
        """
        if built.infrastructure:
            raise PathFailed(built.infrastructure)
        if built.host_code:
            raise NoMachineCode(built.host_code)
        if built.error:
            if COMPILE_ERRORS.search(built.error):
                raise Refusal(Outcome.COMPILE_ERROR, "compile", built.error)
            raise NoMachineCode(f"its launches could not be recorded: {built.error}")
        calls = self._trials.calls
        numbers = cases or range(1 + len(calls.timed))
        results = dict(zip(numbers, map(self._trials.sealed, built.programs), strict=True))
        if (small := results.get(0)) is not None:
            with refusing("verify"):
                check_on_call(self._runner.check, calls.small, small)
        return {name: results[n] for n, name in enumerate(calls.timed, 1) if n in results}

    def seconds(self, request: Mapping[str, tuple[Program, float]]) -> dict[str, float]:
        """Seconds of one launch at each call, of a program with a bound; of the fastest, where that is beyond it.

        Raises `Refusal`, `RunnerLost`.
        """
        requests = {
            n: ([p], TimingLimits(most=_MOST_ALONE, bound_s=bound, checks=0))
            for n, (p, bound) in request.items()
        }
        with refusing("time"):
            answers = time_programs(self._runner.time, self._trials.calls.timed, requests)
        return {
            name: statistics.median(block_means(answer.seconds[0], answer.recorded, strays=False))
            for name, answer in answers.items()
        }

    def is_hopeless(self, trial: NodeTrial, times: float = _HOPELESS) -> bool:
        """Whether every config so far is far from the rival on the whole."""
        return bool(trial.seconds) and trial.log_ratio(trial.best) > math.log(times)

    # --- the rival ---

    def _time_rival(self, trial: NodeTrial) -> tuple[Sequence[int], Sequence[int]]:
        """Time the node beside it; the cases for which configs are compiled first, and later.

        Raises `NoMachineCode`, `PathFailed`.
        """
        job, configs = trial.job, trial.configs
        chosen = job.against_config or (configs[0] if job.against.id == job.node.id else {})
        with self._runner.spending("builds"):
            built = self._builds.begin_once(job.against, chosen, self._runner.began).result()
        if built.host_code:
            raise NoMachineCode(f"the node to be timed beside: {built.host_code}")
        if not built.programs:
            self._builds.forget(job.against, chosen)
            raise PathFailed(f"the node to be timed beside: {built.error or built.infrastructure}")
        programs = [self._trials.sealed(p) for p in built.programs[1:]]
        rivals = dict(zip(self._trials.calls.timed, programs, strict=True))
        keys = {name: (node_key(job.against, chosen), name) for name in rivals}
        try:
            missing = {n: (p, 0.0) for n, p in rivals.items() if keys[n] not in self._rival_seconds}
            for name, seconds in self.seconds(missing).items():
                self._rival_seconds[keys[name]] = seconds
        except Refusal as refused:
            raise PathFailed(f"the node to be timed beside: {refused.detail}") from refused
        trial.rivals, trial.rival_s = rivals, {name: self._rival_seconds[key] for name, key in keys.items()}
        # CUDA is compiled once for all calls.
        return parts_by_code(built.programs) if built.request.cuda is None else ((), ())

    # --- its own configs ---

    def _begin(self, job: NodeJob, config: TrialConfig, cases: Sequence[int] = ()) -> Future[BuildResult]:
        return self._builds.begin(job.node, config, self._runner.began, cases)

    def _time_configs(
        self,
        trial: NodeTrial,
        building: dict[int, Future[BuildResult]],
        parts: tuple[Sequence[int], Sequence[int]],
    ) -> Refusal:
        """Time all that may be the best, and some that are not; why the last that failed did.

        `building` holds those that are compiled for all calls. Raises as `programs`, where the first config is wrong.
        """
        job, configs, (first, rest) = trial.job, trial.configs, parts
        failure = Refusal(Outcome.COMPILE_ERROR, "compile", "no config was built")
        cases = dict[int, Sequence[int]]()
        resting = dict[int, Future[BuildResult]]()
        for number in range(len(configs)):
            if number not in building:  # one of the first may win: all others are compiled at once
                left = range(number, len(configs)) if number >= _FIRST_CONFIGS else (number,)
                cases |= {n: first for n in left if n >= _FIRST_CONFIGS and rest}
                building |= {n: self._begin(job, configs[n], cases.get(n, ())) for n in left}
            try:
                self._time_config(trial, number, building[number], cases.get(number, ()))
            except Refusal as refused:
                failure = refused
                if number == 0 and refused.outcome is Outcome.INCORRECT:
                    raise
            if number < _FIRST_CONFIGS and self._ends_after(trial, number):
                break
            if number in trial.partly and not trial.is_behind(number):
                resting[number] = self._begin(job, configs[number], rest)
        for number, more in resting.items():
            if trial.is_behind(number):
                more.cancel()
                continue
            try:
                self._time_config(trial, number, more, rest, is_last=True)
            except Refusal as refused:
                failure = refused
                trial.partly.pop(number, None)  # how fast a wrong config is teaches nothing
        return failure

    def _time_config(
        self,
        trial: NodeTrial,
        number: int,
        building: Future[BuildResult],
        cases: Sequence[int],
        is_last: bool = False,
    ) -> None:
        """Time a config at the calls of these cases, or at all; not one that takes too long to compile."""
        with self._runner.spending("builds"):
            built = self._builds.within_patience(building, trial.usual_s, self._work.check)
        if built is None:
            trial.late += 1
            return
        programs = self.programs(built, cases)
        best = trial.seconds[trial.best] if trial.seconds else {}
        request = {}
        for name, program in programs.items():
            bound = trial.rival_s[name] * _HOPELESS
            request[name] = program, min(bound, best.get(name, bound) * _BEHIND_BEST)
        trial.add(number, programs, self.seconds(request), is_whole=is_last or not cases)
        trial.usual_s = max(trial.usual_s or 0.0, built.seconds)

    def _ends_after(self, trial: NodeTrial, number: int) -> bool:
        """Whether no config after this one is worth its compilation."""
        return self.is_hopeless(trial, _HOPELESS if number == _FIRST_CONFIGS - 1 else _FAR_BEYOND)


_PATIENCE_S, _PATIENCE, _LOOK_S = 4.0, 3.0, 0.5
"""Least seconds, and times what others of its source took, that a config may compile; how often that is looked at."""


class NodeBuilds:
    """Builds of nodes' configs. Any thread may ask."""

    def __init__(self, builder: CompileWorkers, request: Callable[[Node, TrialConfig], BuildRequest]) -> None:
        """`request`: how a node is compiled for all calls."""
        self._builder, self._request = builder, request
        self._lock = threading.RLock()
        self._under_way: set[Future[BuildResult]] = set()
        self._kept: dict[str, Future[BuildResult]] = {}

    @property
    def idle(self) -> int:
        """Workers that nobody has asked for."""
        return self._builder.idle

    def begin(
        self, node: Node, config: TrialConfig, began: float, cases: Sequence[int] = ()
    ) -> Future[BuildResult]:
        """Compile for the cases of these numbers, or for all. `began`: see `BuildRequest`."""
        if (kept := self._kept.get(node_key(node, config))) is not None and not cases:
            return kept
        request = self._request(node, config)
        built = self._builder.submit(replace(request.only(cases) if cases else request, began=began))
        with self._lock:
            self._under_way.add(built)
        built.add_done_callback(self._under_way.discard)
        return built

    def begin_once(self, node: Node, config: TrialConfig, began: float) -> Future[BuildResult]:
        """Compile a node that others are timed beside, unless that was done before."""
        key = node_key(node, config)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = self.begin(node, config, began)
            return self._kept[key]

    def keep(self, node: Node, config: TrialConfig, built: BuildResult) -> None:
        """Keep a node's known build."""
        done: Future[BuildResult] = Future()
        done.set_result(built)
        with self._lock:
            self._kept[node_key(node, config)] = done

    def forget(self, node: Node, config: TrialConfig) -> None:
        """Have a node built anew for the next that asks."""
        with self._lock:
            self._kept.pop(node_key(node, config), None)

    def within_patience(
        self, building: Future[BuildResult], usual_s: float | None, check: Callable[[], None]
    ) -> BuildResult | None:
        """The build of a config; None for one that compiles far longer than others of its source did.

        The search's next batches wait for all nodes of this one, and what takes so long to compile is rarely fast.
        `usual_s`: the longest that others took which run; where none does yet, any is waited for. `check` raises once
        nobody waits any more.
        """
        patience = math.inf if usual_s is None else max(_PATIENCE_S, _PATIENCE * usual_s)
        while True:
            with suppress(TimeoutError):
                return building.result(_LOOK_S)
            check()
            if self._builder.seconds_of(building) > patience and self._builder.end(building):
                return None

    def give_up(self) -> None:
        """Compile nothing more of what is under way."""
        with self._lock:
            under_way, self._under_way = list(self._under_way), set()
        for one in under_way:
            one.cancel()
        self._builder.give_up()
        with self._lock:
            self._kept = {key: built for key, built in self._kept.items() if not built.cancelled()}

    def end(self) -> None:
        """End whatever is compiled, for others too."""
        self._builder.give_up(0.0)


def node_key(node: Node, config: TrialConfig) -> str:
    """Names a node in one config."""
    return repr((node.id, sorted(config.items(), key=lambda item: item[0])))


def parts_by_code(programs: Sequence[Program]) -> tuple[Sequence[int], Sequence[int]]:
    """Numbers of the programs that have the code in common which most calls have, and of the others.

    `programs` are those of the small call and of every timed one, which count: to compile for the first part is to
    compile once for most of them.
    """
    alike: dict[tuple[bytes, ...], list[int]] = {}
    for number, program in enumerate(programs):
        alike.setdefault(tuple(k.image for k in program.kernels), []).append(number)
    first = max(alike.values(), key=lambda numbers: sum(n > 0 for n in numbers))
    return first, [n for n in range(len(programs)) if n not in first]


_FAR_BETTER = 1.08
"""Times as fast as the source's best config: no config is expected to be that at some calls and slower at others."""


@dataclass
class NodeTrial(Trial):
    """One source of machine code on its way to a verdict."""

    rivals: Mapping[str, Program] = field(default_factory=dict)
    """The rival's programs, by workload."""
    rival_s: Mapping[str, float] = field(default_factory=dict)
    seconds: dict[int, dict[str, float]] = field(default_factory=dict)
    """By config and workload, of configs that were timed at all of them."""
    partly: dict[int, dict[str, float]] = field(default_factory=dict)
    """The seconds of configs that were timed at some workloads."""
    programs: dict[int, dict[str, Program]] = field(default_factory=dict)
    """By config and workload."""
    usual_s: float | None = None
    """The longest that a config took to compile which runs."""
    late: int = 0
    """Configs that took too long to compile."""

    def add(
        self, number: int, programs: Mapping[str, Program], seconds: Mapping[str, float], *, is_whole: bool
    ) -> None:
        """Add a config's timings; `is_whole`: no more of them will come."""
        self.programs[number] = {**self.programs.get(number, {}), **programs}
        known = {**self.partly.pop(number, {}), **seconds}
        (self.seconds if is_whole else self.partly)[number] = known
        self.measurements = len(self.seconds) + len(self.partly)

    def is_behind(self, number: int) -> bool:
        """Whether a config that is timed in part could be the fastest only where it is far better at all other calls
        than the best of those that are timed in full."""
        if number not in self.partly or not self.seconds:
            return False
        known, best = self.partly[number], self.seconds[self.best]
        behind = sum(math.log(s / best[name]) for name, s in known.items())
        return behind > (len(self.rivals) - len(known)) * math.log(_FAR_BETTER)

    def log_ratio(self, number: int) -> float:
        """Mean over workloads of the natural log of a config's seconds over the rival's."""
        return statistics.fmean(math.log(s / self.rival_s[n]) for n, s in self.seconds[number].items())

    @property
    def best(self) -> int:
        """The fastest config so far."""
        return min(self.seconds, key=self.log_ratio)

    def contest(
        self,
        log2_ratio: float,
        error: float,
        seconds: Mapping[str, float],
        theirs: Mapping[str, float],
        **facts: Any,
    ) -> Contest:
        """That of its best config."""
        ranked = [(self.configs[n], self.log_ratio(n) / math.log(2)) for n in self.seconds]
        return Contest(log2_ratio, error, seconds, theirs, self.configs[self.best], ranked, facts)


_OUTCOMES = {
    RunnerFaultKind.HANG: Outcome.TIMEOUT,
    RunnerFaultKind.DEVICE_ERROR: Outcome.RUNTIME_ERROR,
    RunnerFaultKind.CRASH: Outcome.RUNTIME_ERROR,
    RunnerFaultKind.REFUSED: Outcome.OUT_OF_RESOURCES,
}
"""The label of a program that did this."""


@contextmanager
def refusing(stage: str) -> Iterator[None]:
    """Have a source refused at this stage for what its program is rejected for; a rival's fault is one of our own.

    Raises `Refusal`, `PathFailed`.
    """
    try:
        yield
    except ContestantRejected as rejected:
        reason, fault = rejected.reasons[0], rejected.__cause__
        if rejected.which == INCUMBENT:
            raise PathFailed(f"the node beside it failed: {reason.detail}") from rejected
        known = SolutionVerdict("", "", (reason,)).outcome
        outcome = _OUTCOMES[fault.kind] if isinstance(fault, ProgramFault) else known
        detail = reasons_text([reason]) if reason.code is ReasonCode.IMPOSSIBLE else reason.detail
        raise Refusal(outcome, stage, detail) from rejected
