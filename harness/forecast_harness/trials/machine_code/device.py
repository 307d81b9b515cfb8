"""A runner that threads of one device share: whose turn it is, what it is asked, where each job's seconds are spent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from forecast_harness.clocks.devices import DeviceTurns, exclusive
from forecast_harness.clocks.records import Program
from forecast_harness.clocks.runner.client import RunnerClient
from forecast_harness.clocks.runner.messages import CheckAnswer, ProgramInputs, TimingAnswer, TimingRequest
from forecast_harness.trials.judge import SandboxJudge
from forecast_harness.trials.protocol import LaneFailure

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

    def check(self, program: Program, given: ProgramInputs) -> CheckAnswer:
        """As `RunnerClient.check`."""
        with self.use():
            return self._runner.check(program, given)

    def time(self, requests: Sequence[TimingRequest]) -> Sequence[TimingAnswer]:
        """As `RunnerClient.time_calls`."""
        with self.use():
            return self._runner.time_calls(requests)

    @property
    def began(self) -> float:
        """When this thread's job began; 0 before it has one."""
        return getattr(self._job, "began", 0.0)

    def _add_spent(self, stage: str, seconds: float) -> None:
        spent = getattr(self._job, "spent", {})
        spent[stage] = spent.get(stage, 0.0) + seconds


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

    def __init__(self, make: Callable[[], SandboxJudge], work: WorkUnderWay) -> None:
        self._make, self._work = make, work
        self._mutex = threading.Lock()
        self._judge: SandboxJudge | None = None
        self._held_since = 0
        """The value of `given_up` when its present job began."""
        self.is_timing = False
        """Whether it may be using the device for a time that counts."""

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
