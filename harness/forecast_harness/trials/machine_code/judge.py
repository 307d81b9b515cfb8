"""Nodes of a search judged through machine code: a `NodeJudge` whose candidates run no Python where the clock is.

Many threads share one device: each compiles, checks and times one node, and the runner takes one request after
the other, so the device works while others compile. Costly work is done for configs that may still win: one config
is compiled, checked on a small call and timed against the rival's seconds before others are. Full verification is a
job of its own, `verify`, which the search asks for where a node may become the fastest of all, while others are
judged. A solution that is not of kernels alone is judged as host code, and so is every node once the runner has
failed too often.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Outcome
from forecast_harness.clocks.compilation.workers import BuildRequest, BuildResult, CompileWorkers
from forecast_harness.clocks.devices import DeviceBusy, DeviceTurns, exclusive
from forecast_harness.clocks.paired_comparison import CANDIDATE, INCUMBENT, TrialClock
from forecast_harness.clocks.records import Program
from forecast_harness.clocks.runner.client import RunnerClient
from forecast_harness.clocks.runner.messages import (
    PAUSES,
    CheckAnswer,
    ProgramFault,
    ProgramInputs,
    RunnerFaultKind,
    TimingAnswer,
    TimingLimits,
    TimingRequest,
)
from forecast_harness.records import (
    MIN_PROGRESS,
    ConfirmationJob,
    FullVerification,
    Node,
    NodeJob,
    NodeResult,
    VerificationJob,
)
from forecast_harness.sandbox.jobs import SandboxError
from forecast_harness.trials.judge import Judge, SandboxJudge, Trial
from forecast_harness.trials.machine_code.targets import (
    NoMachineCode,
    PathFailed,
    RunnerClock,
    TargetTrials,
    TrialConfig,
    block_means,
    check_on_call,
    time_programs,
)
from forecast_harness.trials.protocol import LaneFailure
from forecast_harness.trials.race import mean_log2_ratio
from forecast_harness.trials.verdict import COMPILE_ERRORS, Contest, Refusal, reasons_text
from forecast_harness.verify.verdict import ContestantRejected, ReasonCode, SolutionVerdict

_PAUSE_FOR_OTHERS_S = 0.06
"""Pause between uses of the device, while host code is judged: its process looks at the lock every 50 ms."""
_STAGES = ("configs", "builds", "queue", "device", "runner")
"""Stages of a job: choosing configs, waiting for builds, waiting for the device, using the device; `runner` is the
time that the runner worked meanwhile."""


class SharedRunner:
    """The runner that all jobs of a device share: each thread has one job at a time, from `begin` on."""

    def __init__(
        self,
        runner: RunnerClient,
        work: WorkUnderWay,
        host: SharedHostJudge,
        *,
        device_lock: str = "",
        locks: Path | None = None,
    ) -> None:
        """`device_lock`: the device's name among all processes that time on it; `locks`: where the locks lie."""
        self._runner, self._work, self._host = runner, work, host
        self._lock_name, self._locks = device_lock, locks
        self._turns = DeviceTurns()
        """A turn for each use of the runner: other work on the device would lengthen a time."""
        self._job = threading.local()

    def begin(self) -> float:
        """Begin a job of this thread; returns the time."""
        self._job.spent = dict.fromkeys(_STAGES, 0.0)
        self._job.began = began = time.perf_counter()
        return began

    @property
    def spent(self) -> Mapping[str, float]:
        """Seconds of this thread's job, by stage."""
        return {name: round(seconds, 3) for name, seconds in self._job.spent.items()}

    @contextmanager
    def spending(self, stage: str) -> Iterator[ExitStack]:
        """Add to a stage of this thread's job the seconds until the stack that this yields is closed."""
        began = time.perf_counter()
        with ExitStack() as stack:
            stack.callback(lambda: self._add_seconds(stage, time.perf_counter() - began))
            yield stack

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """A new process of the runner, and the device for nobody else meanwhile."""
        with self._turns.turn(self.began):
            self._work.check()
            self._runner.renew()
            yield

    @contextmanager
    def use(self) -> Iterator[None]:
        """One use of the runner, alone on the device as far as others ask for it; counted for this thread's job."""
        with self.spending("queue") as queue, self._turns.turn(self.began):
            self._work.check()
            if self._host.is_timing:
                time.sleep(_PAUSE_FOR_OTHERS_S)
            with exclusive(self._lock_name, folder=self._locks):
                queue.close()
                busy = self._runner.busy_s
                with self.spending("device"):
                    yield
                self._add_seconds("runner", self._runner.busy_s - busy)

    def check(self, program: Program, inputs: ProgramInputs) -> CheckAnswer:
        """The answer of `RunnerClient.check`."""
        with self.use():
            return self._runner.check(program, inputs)

    def time(self, requests: Sequence[TimingRequest]) -> Sequence[TimingAnswer]:
        """The answers of `RunnerClient.time_calls`."""
        with self.use():
            return self._runner.time_calls(requests)

    @property
    def began(self) -> float:
        """The time at which this thread's job began; 0 before it has one."""
        return getattr(self._job, "began", 0.0)

    def _add_seconds(self, stage: str, seconds: float) -> None:
        totals = getattr(self._job, "spent", {})
        totals[stage] = totals.get(stage, 0.0) + seconds


_GIVE_UP_AGAIN_S = 0.2
"""Seconds until the judge of host code is told again to give up, as it may have been between two jobs."""
_LAST_JOB_S = 5.0
"""Seconds that a job of host code may take after the end."""


class WorkUnderWay:
    """Ends jobs of other threads: each calls `check` before a long step and before it uses the device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._own = threading.local()
        self._end = threading.Event()
        self.given_up = 0
        """How often all jobs under way were given up; a thread compares it with the value at its beginning."""

    def begin(self) -> None:
        """Begin a job of this thread."""
        self._own.given_up = self.given_up

    def check(self) -> None:
        """Raises `LaneFailure` where nobody waits for this thread's job any more."""
        if self._end.is_set():
            raise LaneFailure("the lanes are closed", self._device)
        if getattr(self._own, "given_up", self.given_up) != self.given_up:
            raise LaneFailure("given up", self._device)

    def give_up(self) -> None:
        """Have all jobs that have begun fail at their next check."""
        self.given_up += 1

    def end(self) -> None:
        """Have all jobs fail, also those that begin later."""
        self._end.set()

    @property
    def has_ended(self) -> bool:
        """Whether no job is to go on."""
        return self._end.is_set()


class SharedHostJudge:
    """A judge of host code that is made when it is needed, and used by one thread at a time."""

    def __init__(self, make: Callable[[], SandboxJudge], work: WorkUnderWay) -> None:
        self._make, self._work = make, work
        self._mutex = threading.Lock()
        self._judge: SandboxJudge | None = None
        self._held_since = 0
        """The value of `given_up` when its present job began."""
        self.is_timing = False
        """Whether its job may be timing on the device."""

    @contextmanager
    def held(self, *, timing: bool) -> Iterator[SandboxJudge]:
        """The judge for one job, which may use the device's clock if `timing`. Raises `LaneFailure`."""
        while not self._mutex.acquire(timeout=_GIVE_UP_AGAIN_S):
            self._work.check()
            if self._held_since != self._work.given_up:
                self.give_up()
        try:
            self._held_since = self._work.given_up
            self._work.check()
            if self._judge is None:
                self._judge = self._make()
            self.is_timing = timing
            yield self._judge
        finally:
            self.is_timing = False
            self._mutex.release()

    def give_up(self) -> None:
        """End its job, if it has one."""
        if (judge := self._judge) is not None:
            judge.give_up()

    def close(self) -> None:
        """End the judge; another is made when it is needed.

        After the end of all work it is ended even in the middle of a job, for which it gets a few seconds.
        """
        is_acquired = self._mutex.acquire(timeout=_LAST_JOB_S if self._work.has_ended else -1)
        try:
            judge, self._judge = self._judge, None
        finally:
            if is_acquired:
                self._mutex.release()
        if judge is not None:
            judge.close()


# --- one node ---


_HOPELESS = 1.3
"""A config is given up at so many times the rival's seconds."""
_FAR_BEYOND = 2.0
"""If the first config takes more than so many times the rival's seconds, no other one is compiled."""
_FIRST_CONFIGS = 2
"""Configs of which one must not be hopeless for others to be compiled; these are compiled for all calls at once."""
_BEHIND_BEST = 1.05
"""Another config is given up at so many times the seconds of the source's best so far."""
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
        # These workers are idle: waiting for the first config to be promising would save nothing.
        ahead = max(1, min(len(configs), self._builds.idle))
        building = {n: self._begin(job, configs[n]) for n in range(ahead)}
        parts = self._time_rival(trial)
        failure = self._time_configs(trial, building, parts)
        if not trial.seconds:
            raise failure
        seconds = {**trial.partly, **trial.seconds}
        self._trials.learn(
            job,
            [(configs[n], [s.get(name, math.nan) for name in trial.rivals]) for n, s in seconds.items()],
            [*trial.rival_s.values()],
        )

    def programs(self, build: BuildResult, cases: Sequence[int] = ()) -> Mapping[str, Program]:
        """A config's programs by workload, right on the small call where that is one of these cases.

        Raises `Refusal`, `NoMachineCode`, `PathFailed`.
        """
        if build.infrastructure:
            raise PathFailed(build.infrastructure)
        if build.host_code:
            raise NoMachineCode(build.host_code)
        if build.error:
            if COMPILE_ERRORS.search(build.error):
                raise Refusal(Outcome.COMPILE_ERROR, "compile", build.error)
            raise NoMachineCode(f"its launches could not be recorded: {build.error}")
        calls = self._trials.calls
        numbers = cases or range(1 + len(calls.timed))
        results = dict(zip(numbers, map(self._trials.sealed, build.programs), strict=True))
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
        config = job.against_config or (configs[0] if job.against.id == job.node.id else {})
        with self._runner.spending("builds"):
            build = self._builds.begin_once(job.against, config, self._runner.began).result()
        if build.host_code:
            raise NoMachineCode(f"the node to be timed beside: {build.host_code}")
        if not build.programs:
            self._builds.forget(job.against, config)
            raise PathFailed(f"the node to be timed beside: {build.error or build.infrastructure}")
        programs = [self._trials.sealed(p) for p in build.programs[1:]]
        rivals = dict(zip(self._trials.calls.timed, programs, strict=True))
        keys = {name: (node_key(job.against, config), name) for name in rivals}
        try:
            missing = {n: (p, 0.0) for n, p in rivals.items() if keys[n] not in self._rival_seconds}
            for name, seconds in self.seconds(missing).items():
                self._rival_seconds[keys[name]] = seconds
        except Refusal as refusal:
            raise PathFailed(f"the node to be timed beside: {refusal.detail}") from refusal
        trial.rivals, trial.rival_s = rivals, {name: self._rival_seconds[key] for name, key in keys.items()}
        # CUDA is compiled once for all calls.
        return parts_by_code(build.programs) if build.request.cuda is None else ((), ())

    # --- its own configs ---

    def _begin(self, job: NodeJob, config: TrialConfig, cases: Sequence[int] = ()) -> Future[BuildResult]:
        return self._builds.begin(job.node, config, self._runner.began, cases)

    def _time_configs(
        self,
        trial: NodeTrial,
        building: dict[int, Future[BuildResult]],
        parts: tuple[Sequence[int], Sequence[int]],
    ) -> Refusal:
        """Time all configs that may be the best, and some that are not; the latest failure.

        `building` has the configs that are compiled for all calls. Raises as `programs`, if the first is wrong.
        """
        job, configs, (first, rest) = trial.job, trial.configs, parts
        failure = Refusal(Outcome.COMPILE_ERROR, "compile", "no config was built")
        cases = dict[int, Sequence[int]]()
        rest_builds = dict[int, Future[BuildResult]]()
        for number in range(len(configs)):
            if number not in building:  # one of the first may win: all others are compiled at once
                numbers = range(number, len(configs)) if number >= _FIRST_CONFIGS else (number,)
                cases |= {n: first for n in numbers if n >= _FIRST_CONFIGS and rest}
                building |= {n: self._begin(job, configs[n], cases.get(n, ())) for n in numbers}
            try:
                self._time_config(trial, number, building[number], cases.get(number, ()))
            except Refusal as refusal:
                failure = refusal
                if number == 0 and refusal.outcome is Outcome.INCORRECT:
                    raise
            if number < _FIRST_CONFIGS and self._ends_after(trial, number):
                break
            if number in trial.partly and not trial.is_behind(number):
                rest_builds[number] = self._begin(job, configs[number], rest)
        for number, building_rest in rest_builds.items():
            if trial.is_behind(number):
                building_rest.cancel()
                continue
            try:
                self._time_config(trial, number, building_rest, rest, is_last=True)
            except Refusal as refusal:
                failure = refusal
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
            build = self._builds.within_patience(building, trial.usual_s, self._work.check)
        if build is None:
            trial.late += 1
            return
        programs = self.programs(build, cases)
        best = trial.seconds[trial.best] if trial.seconds else {}
        request = {}
        for name, program in programs.items():
            bound = trial.rival_s[name] * _HOPELESS
            request[name] = program, min(bound, best.get(name, bound) * _BEHIND_BEST)
        trial.add(number, programs, self.seconds(request), is_whole=is_last or not cases)
        trial.usual_s = max(trial.usual_s or 0.0, build.seconds)

    def _ends_after(self, trial: NodeTrial, number: int) -> bool:
        """Whether no config after this one is worth its compilation."""
        return self.is_hopeless(trial, _HOPELESS if number == _FIRST_CONFIGS - 1 else _FAR_BEYOND)


_PATIENCE_S, _PATIENCE, _LOOK_S = 4.0, 3.0, 0.5
"""A config may compile for the longer of so many seconds and so many times its siblings'; the interval of checks."""


class NodeBuilds:
    """Builds of nodes' configs. Any thread may ask."""

    def __init__(self, builder: CompileWorkers, request: Callable[[Node, TrialConfig], BuildRequest]) -> None:
        """`request`: how a node is compiled for all calls."""
        self._builder, self._request = builder, request
        self._lock = threading.RLock()
        self._under_way: set[Future[BuildResult]] = set()
        self._cache: dict[str, Future[BuildResult]] = {}

    @property
    def idle(self) -> int:
        """Workers without a request."""
        return self._builder.idle

    def begin(
        self, node: Node, config: TrialConfig, began: float, cases: Sequence[int] = ()
    ) -> Future[BuildResult]:
        """Compile for the cases of these numbers, or for all. `began`: see `BuildRequest`."""
        if (future := self._cache.get(node_key(node, config))) is not None and not cases:
            return future
        request = self._request(node, config)
        building = self._builder.submit(replace(request.only(cases) if cases else request, began=began))
        with self._lock:
            self._under_way.add(building)
        building.add_done_callback(self._under_way.discard)
        return building

    def begin_once(self, node: Node, config: TrialConfig, began: float) -> Future[BuildResult]:
        """Compile a node that others are timed beside, unless that was done before."""
        key = node_key(node, config)
        with self._lock:
            if key not in self._cache:
                self._cache[key] = self.begin(node, config, began)
            return self._cache[key]

    def keep(self, node: Node, config: TrialConfig, build: BuildResult) -> None:
        """Keep a node's known build."""
        future: Future[BuildResult] = Future()
        future.set_result(build)
        with self._lock:
            self._cache[node_key(node, config)] = future

    def forget(self, node: Node, config: TrialConfig) -> None:
        """Have a node built anew the next time."""
        with self._lock:
            self._cache.pop(node_key(node, config), None)

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
        """Compile nothing more of the builds under way."""
        with self._lock:
            under_way, self._under_way = list(self._under_way), set()
        for future in under_way:
            future.cancel()
        self._builder.give_up()
        with self._lock:
            self._cache = {key: f for key, f in self._cache.items() if not f.cancelled()}

    def end(self) -> None:
        """End all compilations, also those of other users."""
        self._builder.give_up(0.0)


def node_key(node: Node, config: TrialConfig) -> str:
    """Names a node in one config."""
    return repr((node.id, sorted(config.items(), key=lambda item: item[0])))


def parts_by_code(programs: Sequence[Program]) -> tuple[Sequence[int], Sequence[int]]:
    """Numbers of the programs that have the code in common which most calls have, and of the others.

    `programs` are those of the small call and of every timed one, which count: to compile for the first part is to
    compile once for most of them.
    """
    numbers_of_code: dict[tuple[bytes, ...], list[int]] = {}
    for number, program in enumerate(programs):
        numbers_of_code.setdefault(tuple(k.image for k in program.kernels), []).append(number)
    first = max(numbers_of_code.values(), key=lambda numbers: sum(n > 0 for n in numbers))
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
    """Seconds by config and workload, of configs that were timed at all workloads."""
    partly: dict[int, dict[str, float]] = field(default_factory=dict)
    """The seconds of configs that were timed at some workloads."""
    programs: dict[int, dict[str, Program]] = field(default_factory=dict)
    """Programs by config and workload."""
    usual_s: float | None = None
    """The longest compilation of a config that runs."""
    late: int = 0
    """Configs that took too long to compile."""

    def add(
        self, number: int, programs: Mapping[str, Program], seconds: Mapping[str, float], *, is_whole: bool
    ) -> None:
        """Add a config's timings; `is_whole`: no more of them will come."""
        self.programs[number] = {**self.programs.get(number, {}), **programs}
        timings = {**self.partly.pop(number, {}), **seconds}
        (self.seconds if is_whole else self.partly)[number] = timings
        self.measurements = len(self.seconds) + len(self.partly)

    def is_behind(self, number: int) -> bool:
        """Whether a config that is timed in part could be the fastest only where it is far better at all other calls
        than the best of those that are timed in full."""
        if number not in self.partly or not self.seconds:
            return False
        timings, best = self.partly[number], self.seconds[self.best]
        behind = sum(math.log(s / best[name]) for name, s in timings.items())
        return behind > (len(self.rivals) - len(timings)) * math.log(_FAR_BETTER)

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
        """The contest of its best config."""
        ranking = [(self.configs[n], self.log_ratio(n) / math.log(2)) for n in self.seconds]
        return Contest(log2_ratio, error, seconds, theirs, self.configs[self.best], ranking, facts)


_OUTCOMES = {
    RunnerFaultKind.HANG: Outcome.TIMEOUT,
    RunnerFaultKind.DEVICE_ERROR: Outcome.RUNTIME_ERROR,
    RunnerFaultKind.CRASH: Outcome.RUNTIME_ERROR,
    RunnerFaultKind.REFUSED: Outcome.OUT_OF_RESOURCES,
}
"""The label of a program with this fault."""


@contextmanager
def refusing(stage: str) -> Iterator[None]:
    """Turn the rejection of a program into the refusal of its source at this stage; a rival's fault is our own.

    Raises `Refusal`, `PathFailed`.
    """
    try:
        yield
    except ContestantRejected as rejection:
        reason, fault = rejection.reasons[0], rejection.__cause__
        if rejection.which == INCUMBENT:
            raise PathFailed(f"the node beside it failed: {reason.detail}") from rejection
        usual = SolutionVerdict("", "", (reason,)).outcome
        outcome = _OUTCOMES[fault.kind] if isinstance(fault, ProgramFault) else usual
        detail = reasons_text([reason]) if reason.code is ReasonCode.IMPOSSIBLE else reason.detail
        raise Refusal(outcome, stage, detail) from rejection


# --- the judge ---


_UNPAIRED_SD = 0.1
"""The error of log2(time ratio) where a config was given up: it was timed after the rival, not beside it."""
_RACE = TimingLimits(least=2 * PAUSES, most=4 * PAUSES, checks=2)
_MOST_FAILURES = 3
"""After so many failures of our own in a row, every node is judged as host code."""
PATH = "machine code"


class MachineCodeJudge(Judge[NodeTrial]):
    """Judges nodes of one target on one device. `judge` may be called from many threads.

    `host` makes the judge for all that is no machine code, once it is needed: host code, full verification and
    confirmations. `on_failure` is told once of a failure of our own, and whether it is the last one that is tried;
    the node is then judged as host code, unless `insist`, where the lane fails.
    """

    def __init__(
        self,
        runner: RunnerClient,
        builder: CompileWorkers,
        trials: TargetTrials,
        *,
        host: Callable[[], SandboxJudge],
        device: str = "",
        insist: bool = False,
        on_failure: Callable[[str], None] = lambda reason: None,
        device_lock: str = "",
        locks: Path | None = None,
    ) -> None:
        """`device_lock`: the device's name among all processes that time on it; `locks`: where the locks lie."""
        super().__init__(device)
        self._trials = trials
        self._insist, self._on_failure = insist, on_failure
        self._work = WorkUnderWay(device)
        self._host = SharedHostJudge(host, self._work)
        self._runner = SharedRunner(runner, self._work, self._host, device_lock=device_lock, locks=locks)
        self._failures_lock = threading.Lock()
        self._lead = math.inf
        """Lowest score that a node has reached here, unless it was refused later."""
        self._builds = NodeBuilds(builder, trials.request)
        self._tuner = NodeTuner(self._builds, self._runner, trials, self._work)
        self._failures = 0

    def _judge_node(self, job: NodeJob) -> NodeResult:
        """Check, tune and time a node beside `job.against`; as host code where that cannot be."""
        self._work.begin()
        self._runner.begin()
        why = "the runner failed too often" if self._failures >= _MOST_FAILURES else ""
        if not why:
            try:
                verdict = self._verdict_of(self._stages, NodeTrial(job))
                stage_seconds = self._runner.spent
                facts = {**verdict.facts, "path": PATH, "spent": stage_seconds}
                return replace(verdict, device_seconds=stage_seconds["device"], facts=facts)
            except CancelledError as error:
                raise LaneFailure("given up", self._device) from error
            except (NoMachineCode, RecordError) as error:
                why = str(error)
            except (PathFailed, SandboxError, DeviceBusy) as error:  # a lost runner is the second one
                self._work.check()  # a job that was given up has not failed
                if self._insist:
                    raise LaneFailure(str(error), self._device) from error
                why = str(error)
                self._note_failure(why)
        with self._host.held(timing=True) as host:
            verdict = host.judge(job)
        return replace(verdict, facts={**verdict.facts, "path": "host code", "path_reason": why[:300]})

    def verify(self, job: VerificationJob) -> FullVerification:
        """Verify a node in a sandbox, on hidden sizes and values. Raises `LaneFailure`."""
        # It times nothing that is kept, so the device may serve others at the same time.
        self._work.begin()
        began = time.perf_counter()
        with self._host.held(timing=False) as host:
            waiting_s = time.perf_counter() - began
            host.prepare_confirmation()  # its lanes open meanwhile: it may be asked for before this has ended
            result = host.verify(job)
        if not result.is_right:
            self._lead = math.inf
        own = {"waited": round(waiting_s, 3), "verify": round(time.perf_counter() - began - waiting_s, 3)}
        facts = {**result.facts, "spent_verifying": {**result.facts.get("spent_verifying", {}), **own}}
        return replace(result, wall_seconds=time.perf_counter() - began, facts=facts)

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        """Confirm as the judge of host code, in a lane of its own, with the whole protocol. Raises `LaneFailure`."""
        self._work.begin()
        began = time.perf_counter()
        with self._host.held(timing=True) as host:
            if confirm.seconds is not None:  # waiting for the judge has taken some of them
                remaining_s = confirm.seconds - (time.perf_counter() - began)
                confirm = replace(confirm, seconds=max(0.0, remaining_s))
            return host.confirm(confirm)

    def try_seed(self, job: NodeJob, known: tuple[TrialConfig, BuildResult] | None = None) -> str:
        """Why this target cannot be judged through machine code, by its seed; '' if it can.

        `known`: the seed in a config, where it is compiled already. It is known to be right: what goes wrong with it
        is a failure of our own, or of what machine code can express.
        """
        try:
            config = known[0] if known else self._trials.configs(replace(job, trials=1))[0]
            if known:
                self._builds.keep(job.node, config, known[1])
            build = self._builds.begin_once(job.node, config, self._runner.began).result()
            request = {n: (program, 0.0) for n, program in self._tuner.programs(build).items()}
            for name, seconds in self._tuner.seconds(request).items():
                if problem := self._trials.implausible(name, seconds):
                    return problem
        except (Refusal, NoMachineCode, PathFailed, SandboxError, DeviceBusy) as error:
            return str(error)
        return ""

    def end(self) -> None:
        """Judge nothing more: nodes under way fail before their next use of the device."""
        self._work.end()
        self.give_up()
        self._builds.end()

    def give_up(self) -> None:
        """See `NodeJudge`. Nothing more is compiled for nodes under way, and none uses the device again."""
        self._work.give_up()
        self._builds.give_up()
        self._host.give_up()

    def close(self) -> None:
        """End the judge of host code; another is made when it is needed. Runner and builder are their owner's."""
        self._host.close()

    def _note_failure(self, reason: str) -> None:
        with self._failures_lock:
            self._failures += 1
            last = self._failures == _MOST_FAILURES
        self._on_failure(f"{reason}; from here on, all is judged as host code" if last else reason)

    # --- the stages ---

    def _read(self, trial: NodeTrial) -> None:
        job, language = trial.job, self._trials.language
        if job.node.language != language or job.against.language != language:
            raise NoMachineCode(f"only {language} sources of this target are compiled to machine code")
        with self._runner.spending("configs"):
            trial.configs = self._trials.configs(job, self._work.check)

    def _choose(self, trial: NodeTrial) -> Sequence[TrialConfig]:
        """The fastest, each compiled, right on one call and timed alone as far as that may change which it is."""
        self._tuner.tune(trial)
        return [trial.configs[trial.best]]

    def _race(self, trial: NodeTrial, configs: Sequence[TrialConfig]) -> Contest:
        """The best config beside the other node; twice, where it seems to be faster."""
        trial.facts = {"verified_in_full": False, **({"late_configs": trial.late} if trial.late else {})}
        if self._tuner.is_hopeless(trial):
            contest = self._hopeless_contest(trial)
        elif trial.job.node.id == trial.job.against.id:
            contest = self._own_contest(trial)
        else:
            contest = self._time_beside(trial, compares=False)
            if contest.log2_ratio < -MIN_PROGRESS:
                contest = max(contest, self._time_again(trial, contest), key=lambda c: c.log2_ratio)
            if contest.log2_ratio < -MIN_PROGRESS:
                self._lead = min(self._lead, trial.job.against_score + contest.log2_ratio)
            else:
                contest = replace(contest, log2_ratio=max(0.0, contest.log2_ratio))
            contest = replace(contest, text=contest.times_beside("Right at these sizes"))
        self._failures = 0
        return contest

    def _hopeless_contest(self, trial: NodeTrial) -> Contest:
        ratio, count = trial.log_ratio(trial.best) / math.log(2), trial.measurements
        after = f"{count} of {len(trial.configs)} configs"
        text = f"Right on a small call, and given up after {after}: {2**ratio:.2f} times slower."
        contest = trial.contest(
            ratio, _UNPAIRED_SD, trial.seconds[trial.best], trial.rival_s, given_up_after=count
        )
        return replace(contest, text=text)

    def _own_contest(self, trial: NodeTrial) -> Contest:
        """The contest of a node with itself: only its best config is of interest."""
        own_seconds = trial.seconds[trial.best]
        for name, seconds in own_seconds.items():
            if problem := self._trials.implausible(name, seconds):
                raise Refusal(Outcome.INFRASTRUCTURE, "time", f"impossible: {problem}")
        text = "Right at these sizes; others are timed beside it."
        return replace(trial.contest(0.0, 0.0, own_seconds, own_seconds, blocks=0), text=text)

    def _time_again(self, trial: NodeTrial, first: Contest) -> Contest:
        """Time the source beside its rival again, and compare outputs; in a new runner, if it may take the lead.

        A new runner has no data that earlier programs may have left in the driver's own memory.
        """
        if trial.job.against_score + first.log2_ratio >= self._lead - MIN_PROGRESS:
            return self._time_beside(trial, compares=True)
        with self._runner.renewed():
            return self._time_beside(trial, compares=True)

    def _time_beside(self, trial: NodeTrial, *, compares: bool) -> Contest:
        """Time the best config beside the rival; `compares`: outputs of some launches with the right ones.

        Raises `Refusal`, `PathFailed`, `RunnerLost`.
        """
        programs = trial.programs[trial.best]
        pairs = {name: (trial.rivals[name], program) for name, program in programs.items()}
        calls, implausible = self._trials.calls.timed, self._trials.implausible
        clock: TrialClock = RunnerClock(self._runner.time, calls, pairs, implausible, _RACE, strays=False)
        with refusing("time"):
            clock.place()
            if compares:
                clock.check()
            else:
                clock.sample(CANDIDATE, True)
        theirs, own = ({n: clock.seconds[which, n] for n in programs} for which in (INCUMBENT, CANDIDATE))
        blocks = [[math.log(a / b) for a, b in zip(theirs[n], own[n], strict=True)] for n in programs]
        medians = ({n: statistics.median(s) for n, s in side.items()} for side in (own, theirs))
        return trial.contest(*mean_log2_ratio(blocks), *medians, blocks=min(len(b) for b in blocks))
