"""A runner that threads of one device share: whose turn it is, what it is asked, where each job's seconds are spent."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from forecast_autotune.records import Outcome
from forecast_autotune.timing import mean_without_strays
from forecast_harness.clocks.devices import DeviceTurns, exclusive
from forecast_harness.clocks.records import Program
from forecast_harness.clocks.runner.client import RunnerClient
from forecast_harness.clocks.runner.messages import (
    PAUSES,
    CheckAnswer,
    ProgramFault,
    TimingAnswer,
    TimingLimits,
    TimingRequest,
)
from forecast_harness.trials.judge import HostJudge
from forecast_harness.trials.machine_code.targets import (
    FAULT_OUTCOMES,
    PathFailed,
    TargetTrials,
    TrialCall,
    first_violation,
)
from forecast_harness.trials.protocol import LaneFailure
from forecast_harness.trials.verdict import Refusal

_MOST_ALONE = PAUSES
"""Launches of a config that is timed alone, to choose among configs: a round of pauses, or two blocks without. The one
chosen is timed again beside the rival."""
_BLOCK = 4
"""Launches that are taken together, where they are not behind pauses."""
_MOST_STRAYS = 0.25
"""The share of a block's launches that somebody else may have held up."""
_PAUSE_FOR_OTHERS_S = 0.06
"""Between uses of the device, while host code is judged: who waits for a lock of files looks every 50 ms."""
_STAGES = ("configs", "builds", "queue", "device", "runner")
"""In which a job's seconds are spent: choosing configs, waiting for what is compiled, for the device, and for answers
of the runner, which worked so long on them."""


class SharedRunner:
    """One thread is one job at a time, from `begin` on."""

    def __init__(
        self,
        runner: RunnerClient,
        trials: TargetTrials,
        work: WorkUnderWay,
        host: SharedHostJudge,
        *,
        device_lock: str = "",
        locks: Path | None = None,
    ) -> None:
        """`device_lock`: the device's name among all processes that time on it; `locks`: where the locks lie."""
        self._runner, self._trials, self._work, self._host = runner, trials, work, host
        self._lock_name, self._locks = device_lock, locks
        self._turns = DeviceTurns()
        """Held by whoever uses the runner: what others do there meanwhile would be in a time."""
        self._job = threading.local()

    def begin(self) -> float:
        """This thread begins a job; when that was."""
        self._job.spent = dict.fromkeys(_STAGES, 0.0)
        self._job.began = began = time.perf_counter()
        return began

    @property
    def spent(self) -> Mapping[str, float]:
        """Seconds of this thread's job, by stage."""
        return {name: round(seconds, 3) for name, seconds in self._job.spent.items()}

    @contextmanager
    def spending(self, stage: str) -> Iterator[ExitStack]:
        """Counts for this thread's job what a stage takes, until the stack that it gives is closed."""
        began = time.perf_counter()
        with ExitStack() as stack:
            stack.callback(lambda: self._add_spent(stage, time.perf_counter() - began))
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
                self._add_spent("runner", self._runner.busy_s - busy)

    def check(self, program: Program, call: TrialCall) -> CheckAnswer:
        """Some launches of a program. Raises `Refusal` for its faults."""
        try:
            with self.use():
                return self._runner.check(program, call.given)
        except ProgramFault as fault:
            raise Refusal(FAULT_OUTCOMES[fault.kind], "verify", fault.detail) from fault

    def seconds(self, request: Mapping[str, tuple[Program, float]]) -> dict[str, float]:
        """Seconds of one launch at each call, of a program with a bound; of the fastest, where that is beyond it."""
        result = self.time(
            {
                n: ([p], TimingLimits(most=_MOST_ALONE, bound_s=bound, checks=0))
                for n, (p, bound) in request.items()
            }
        )
        return {
            name: statistics.median(block_means(answer.seconds[0], answer.recorded, strays=False))
            for name, answer in result.items()
        }

    def time(self, request: Mapping[str, tuple[Sequence[Program], TimingLimits]]) -> dict[str, TimingAnswer]:
        """The runner's answer for each call. Raises `Refusal`, `PathFailed`."""
        if not request:
            return {}
        candidates = next(iter(request.values()))[0]
        requests = [
            TimingRequest(programs, self._trials.calls.timed[name].given, limits)
            for name, (programs, limits) in request.items()
        ]
        try:
            with self.use():
                answers = self._runner.time_calls(requests)
        except ProgramFault as fault:
            if fault.candidate != candidates[-1].candidate:
                raise PathFailed(f"the node beside it failed: {fault.detail}") from fault
            raise Refusal(FAULT_OUTCOMES[fault.kind], "time", fault.detail) from fault
        if problem := first_violation(answers[-1].violations):
            raise Refusal(Outcome.INCORRECT, "time", problem)
        return dict(zip(request, answers, strict=True))

    @property
    def began(self) -> float:
        """When this thread's job began; 0 before it has one."""
        return getattr(self._job, "began", 0.0)

    def _add_spent(self, stage: str, seconds: float) -> None:
        spent = getattr(self._job, "spent", {})
        spent[stage] = spent.get(stage, 0.0) + seconds


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


_GIVE_UP_AGAIN_S = 0.2
"""After which the judge of host code is told again to give up, where it was between two jobs of its sandbox."""
_LAST_JOB_S = 5.0
"""How long a job of host code may take after the end."""


class WorkUnderWay:
    """Ends jobs of other threads: each asks `check` before what is long or uses the device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._own = threading.local()
        self._ended = threading.Event()
        self.given_up = 0
        """How often all that was under way was given up; a thread compares it with what it was when it began."""

    def begin(self) -> None:
        """This thread begins a job."""
        self._own.given_up = self.given_up

    def check(self) -> None:
        """Raises `LaneFailure` where nobody waits for this thread's job any more."""
        if self._ended.is_set():
            raise LaneFailure("the lanes are closed", self._device)
        if getattr(self._own, "given_up", self.given_up) != self.given_up:
            raise LaneFailure("given up", self._device)

    def give_up(self) -> None:
        """Have all jobs that have begun fail at their next check."""
        self.given_up += 1

    def end(self) -> None:
        """Have all jobs fail, also those that begin later."""
        self._ended.set()

    @property
    def has_ended(self) -> bool:
        """Whether no job is to go on."""
        return self._ended.is_set()


class SharedHostJudge:
    """A judge of host code that is made when it is needed, and used by one thread at a time."""

    def __init__(self, make: Callable[[], HostJudge], work: WorkUnderWay) -> None:
        self._make, self._work = make, work
        self._mutex = threading.Lock()
        self._judge: HostJudge | None = None
        self._held_since = 0
        """The value of `given_up` when its present job began."""
        self.is_timing = False
        """Whether it may be using the device for a time that counts."""

    @contextmanager
    def held(self, *, timing: bool) -> Iterator[HostJudge]:
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
        """End it; another is made when it is needed.

        After the end of all work it is ended even if it is at a job, which it may be for a while before.
        """
        held = self._mutex.acquire(timeout=_LAST_JOB_S if self._work.has_ended else -1)
        try:
            judge, self._judge = self._judge, None
        finally:
            if held:
                self._mutex.release()
        if judge is not None:
            judge.close()
