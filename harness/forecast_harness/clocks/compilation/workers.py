"""Compilation of candidates in sandboxed workers without a device, as many at once as there are processors."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from forecast_autotune.errors import RecordError, SettingsError
from forecast_harness.clocks.compilation.nvcc import (
    COMPILE_LIMITS,
    CudaBuild,
    CudaCompileError,
    compile_source,
    launched_programs,
)
from forecast_harness.clocks.compilation.requests import (
    BuildRequest,
    BuildResult,
    CallCase,
    buffer_bytes,
    read_answer,
)
from forecast_harness.clocks.records import BufferRole, MachineCodeError, PlanBuffer
from forecast_harness.sandbox.jobs import (
    JobResult,
    JobStatus,
    ResourceLimits,
    SandboxError,
    SandboxJob,
)
from forecast_harness.sandbox.lane import SandboxLane
from forecast_harness.sandbox.lane_pools import OpeningLanes, close_lanes, end_pools

SOURCE_FILE = "solution.py"
_JOB_ENTRY = "forecast_harness.clocks.recording.solution:main"
_WARM = (
    "torch",
    "triton",
    "forecast_harness.clocks.recording.warm_up",
    "forecast_harness.clocks.recording.solution",
    "forecast_harness.trials.judging.kernels.cell",
    "forecast_harness.trials.judging.kernels.race",
    "forecast_autotune.features.trace",
)
"""What builds and traces import."""
LONG_S = 0.5
"""After which a job that nobody waits for is ended; a lane takes as long to be ready for another one."""
_NICENESS = 10
"""There are as many as processors: what launches and times must not wait for one."""
_WORKERS_PER_KEPT = 8
"""For so many workers there is one more that does other jobs alone: what is to be compiled next depends on those."""
_MOST_TOGETHER = 4
"""Requests of one source that a worker takes together where many wait: of half a second that a config takes alone, a
fifth is for a process of its own."""


class CompileWorkers:
    """Workers that compile; use as a context manager, or `open` and `close` it. `submit` never blocks."""

    def __init__(
        self, device: Mapping[str, Any] | None = None, count: int = 0, scratch: str | Path | None = None
    ) -> None:
        """`device`: `arch` (90 for sm_90), `properties` as Triton has them; None: it is set before `submit`.

        `count`: 0 for all processors.
        """
        self.count = count or len(os.sched_getaffinity(0))
        self.device = dict(device or {})
        self._lanes = FreeLanes()
        self._pending, self._pending_lock = 0, threading.Lock()
        self._began: dict[SandboxLane, float] = {}
        """Of the jobs under way, by lane."""
        self._waiting = WaitingRequests[BuildRequest, BuildResult](_MOST_TOGETHER)
        self._compiling: dict[Future[BuildResult], tuple[SandboxLane, int]] = {}
        """The lanes of compilations under way, and how many they have taken together."""
        self._broken_up = set[Future[BuildResult]]()
        """Of compilations whose worker had taken several, which are to be begun again alone."""
        self._given_up = 0
        """How often all that was under way was given up."""
        self._closed = False
        self._scratch = scratch
        self._open: list[SandboxLane] = []
        self._opening = OpeningLanes()
        self._to_open, self._opened = self.count, Future[None]()

    def __enter__(self) -> CompileWorkers:
        return self.open()

    def open(self) -> CompileWorkers:
        """Wait for the first worker; the others come while it works. Raises `SandboxError` where none comes."""
        self.start()
        if (failure := self._opened.exception()) is not None:
            self.close()
            raise failure
        return self

    def start(self) -> CompileWorkers:
        """Open workers in the background: what is asked of them waits for one, and fails where none comes."""
        self._pool = ThreadPoolExecutor(self.count, "compile")
        self._beside = ThreadPoolExecutor(self.count, "beside")
        for _ in range(self.count):
            self._pool.submit(self._open_lane).add_done_callback(self._note_opened)
        for _ in range(self.count // _WORKERS_PER_KEPT):
            self._beside.submit(self._open_lane, kept=True)
        return self

    def _note_opened(self, lane: Future[None]) -> None:
        failure = SandboxError("the compile workers have ended") if lane.cancelled() else lane.exception()
        with self._pending_lock:
            self._to_open -= 1
            if self._opened.done():
                return
            if failure is None:
                self._opened.set_result(None)
            elif not self._to_open:
                self._opened.set_exception(failure)
                self._lanes.end()

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers, and what they are at; what waits is cancelled."""
        self._closed = True
        self._opening.give_up()
        self._waiting.cancel()
        end_pools((self._pool, self._beside), lambda: self.give_up(0.0))
        self._waiting.cancel()  # what came just before the pool took nothing more
        close_lanes(self._open)

    def give_up(self, after_s: float = LONG_S) -> None:
        """End the jobs that have taken so long already: nobody waits for them any more."""
        self._given_up += 1
        now = time.monotonic()
        for lane, began in list(self._began.items()):
            if now - began >= after_s:
                lane.give_up()

    def _open_lane(self, kept: bool = False) -> None:
        lane = SandboxLane(scratch=self._scratch, warm=_WARM, niceness=_NICENESS)
        self._opening.enter(lane)
        self._open.append(lane)
        if kept:
            self._lanes.keep(lane)
        else:
            self._lanes.put(lane)

    @property
    def idle(self) -> int:
        """Workers that nobody has asked for."""
        return max(0, self.count - self._pending)

    def submit(self, request: BuildRequest) -> Future[BuildResult]:
        """Compile a request on the next free worker, after those begun earlier."""
        waiting = WaitingRequest[BuildRequest, BuildResult](request, self._key(request), request.began)
        self._add_pending(1)
        waiting.answer.add_done_callback(self._note_built)
        self._waiting.add(waiting)
        try:
            self._pool.submit(self._build_next)
        except RuntimeError:
            waiting.answer.cancel()
            raise
        return waiting.answer

    def _key(self, request: BuildRequest) -> object:
        """What requests have in common that one worker takes together: kernels of one source, which no launcher of its
        own has seen in another config; None for others."""
        if request.cuda is not None or not request.launches:
            return None
        return request.source, request.entry, request.cases

    def _note_built(self, built: Future[BuildResult]) -> None:
        self._broken_up.discard(built)
        self._add_pending(-1)

    def seconds_of(self, building: Future[BuildResult]) -> float:
        """For how long a compilation has been under way; 0 while it waits for a worker, and once it has ended.

        Where a worker has taken several, it is twice the share of each: one of them may take far longer than others.
        """
        with self._pending_lock:
            lane, together = self._compiling.get(building, (None, 1))
            began = None if lane is None else self._began.get(lane)
        return 0.0 if began is None else (time.monotonic() - began) * min(1.0, 2.0 / together)

    def end(self, building: Future[BuildResult]) -> bool:
        """End a compilation that nobody waits for any more, so that its worker is free for another; whether it ends.

        One that waits for a worker and cannot be cancelled goes on. What a worker has taken together is begun again
        alone, all of it: which of them takes so long is not known.
        """
        if building.cancel():
            return True
        with self._pending_lock:  # the lane is lent to no other job meanwhile
            lane, together = self._compiling.get(building, (None, 1))
            if lane is None:
                return False
            if together > 1:
                self._broken_up.add(building)
            lane.give_up()
            return together == 1

    def _add_pending(self, count: int) -> None:
        with self._pending_lock:
            self._pending += count

    def run_jobs(self, jobs: Sequence[SandboxJob], limits: ResourceLimits) -> list[JobResult]:
        """Do other jobs of the sandbox, which are short, ahead of requests that wait.

        Raises `SandboxError` after the end.
        """
        self._add_pending(len(jobs))
        try:
            return list(self._beside.map(lambda job: self._run_job(job, limits, quick=True), jobs))
        except (CancelledError, RuntimeError) as error:
            raise SandboxError("the compile workers have ended") from error
        finally:
            self._add_pending(-len(jobs))

    def _run_job(
        self,
        job: SandboxJob,
        limits: ResourceLimits,
        quick: bool = False,
        building: Sequence[Future[BuildResult]] = (),
    ) -> JobResult:
        """On the next free worker. Raises `SandboxError` where it is given up, and after the end."""
        lane = self._lanes.take(quick=quick)
        if lane is None:
            raise SandboxError(f"no compile worker has come: {self._opened.exception()}")
        try:
            if self._closed:
                raise SandboxError("the compile workers have ended")
            self._began[lane] = time.monotonic()
            with self._pending_lock:
                self._compiling |= dict.fromkeys(building, (lane, len(building)))
            return lane.run(job, limits)
        finally:
            self._began.pop(lane, None)
            with self._pending_lock:
                for one in building:
                    self._compiling.pop(one, None)
            self._lanes.put(lane)

    def _build_next(self) -> None:
        """Answer the first request that waits, and others of its source with it where many wait."""
        taken, given_up = self._waiting.take(self.count), self._given_up
        if len(taken) > 1:
            with contextlib.suppress(Exception):  # alone, each of them says what is wrong with it
                self._build_together(taken)
        for one in taken:
            if one.answer.done():
                continue
            try:
                if len(taken) > 1 and self._given_up != given_up:
                    one.answer.set_result(BuildResult(one.request, infrastructure="it was given up"))
                else:
                    one.answer.set_result(self._build(one.request, one.answer))
            except BaseException as error:
                one.answer.set_exception(error)

    def _build_together(self, taken: Sequence[WaitingRequest[BuildRequest, BuildResult]]) -> None:
        """Answer what one job can; what is left has failed, or nothing is known of it.

        Raises `SandboxError` for requests that cannot be told to a cell together, and where the job was broken up.
        """
        job = self._job(*(t.request for t in taken))
        try:
            result = self._run_job(job, COMPILE_LIMITS, building=[t.answer for t in taken])
        except SandboxError as error:
            if any(t.answer in self._broken_up for t in taken) and not self._closed:
                raise
            for one in taken:
                one.answer.set_result(BuildResult(one.request, infrastructure=str(error)[:2000]))
            return
        if result.status is JobStatus.OK:
            for number, (one, told) in enumerate(zip(taken, result.value, strict=True)):
                if told is not None:
                    one.answer.set_result(self._answer(one.request, result, number))

    def _build(self, request: BuildRequest, building: Future[BuildResult]) -> BuildResult:
        if request.cuda is not None:
            return self._build_cuda(request, request.cuda, building)
        try:
            result = self._run_job(self._job(request), COMPILE_LIMITS, building=[building])
        except SandboxError as error:
            return BuildResult(request, infrastructure=str(error)[:2000])
        return self._answer(request, result)

    def _job(self, *requests: BuildRequest) -> SandboxJob:
        """Of one source. Raises `SandboxError` for requests that cannot be told to a cell."""
        first = requests[0]
        payload = {
            "file": SOURCE_FILE,
            "entry": first.entry,
            "device": self.device,
            "cases": [c.to_json() for c in first.cases],
            "requests": [
                {
                    "options": dict(r.options),
                    "choice": r.choice,
                    "launches": [dict(one) for one in r.launches],
                }
                for r in requests
            ],
        }
        return SandboxJob(_JOB_ENTRY, payload, {SOURCE_FILE: first.source})

    def _answer(self, request: BuildRequest, result: JobResult, number: int = 0) -> BuildResult:
        try:
            return read_answer(request, result, number)
        except (MachineCodeError, RecordError, ValueError, TypeError, LookupError) as error:
            said = f"the answer breaks a rule: {error}"[:2000]
            return BuildResult(request, error=said, seconds=result.seconds)

    def _build_cuda(
        self, request: BuildRequest, asked: CudaBuild, building: Future[BuildResult]
    ) -> BuildResult:
        began, arch = time.monotonic(), int(self.device["arch"])
        cases = [(a, _buffers(c)) for a, c in zip(asked.axes, request.cases, strict=True)]
        try:
            compiled = compile_source(
                request.source,
                asked.signature,
                asked.config,
                arch,
                lambda job: self._run_job(job, COMPILE_LIMITS, building=[building]),
            )
            programs = launched_programs(
                request.candidate, compiled, asked.signature, arch, cases, asked.config
            )
        except CudaCompileError as error:
            said = f"CompilationError: {error}"[:2000]
            return BuildResult(request, error=said, seconds=time.monotonic() - began)
        except (SandboxError, SettingsError) as error:
            return BuildResult(request, infrastructure=str(error)[:2000])
        return BuildResult(request, programs, seconds=time.monotonic() - began)


def _buffers(case: CallCase) -> list[PlanBuffer]:
    return [PlanBuffer(n, BufferRole(t.role), buffer_bytes(t)) for n, t in case.tensors.items()]


class FreeLanes:
    """Some lanes are kept for quick jobs, which need not wait for long ones; any other lane does either.

    What is to be compiled next depends on quick jobs, so that they go first: a long one that waits is one of many.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._kept: deque[SandboxLane] = deque()
        self._others: deque[SandboxLane] = deque()
        self._own: set[SandboxLane] = set()
        """Lanes that are kept for quick jobs, free or not."""
        self._quick_waiting = 0
        self._none_comes = False

    def keep(self, lane: SandboxLane) -> None:
        """Add a lane for quick jobs alone."""
        with self._changed:
            self._own.add(lane)
        self.put(lane)

    def put(self, lane: SandboxLane) -> None:
        """A lane is free: a new one, or one that has done its job."""
        with self._changed:
            (self._kept if lane in self._own else self._others).append(lane)
            self._changed.notify_all()

    def end(self) -> None:
        """No lane comes any more: nobody waits for one."""
        with self._changed:
            self._none_comes = True
            self._changed.notify_all()

    def take(self, *, quick: bool = False) -> SandboxLane | None:
        """The lane that has been free the longest; waits for one. None where none comes."""
        with self._changed:
            self._quick_waiting += quick
            try:
                self._changed.wait_for(lambda: self._none_comes or self._has_one(quick))
            finally:
                self._quick_waiting -= quick
            found = self._kept if quick and self._kept else self._others
            return found.popleft() if found else None

    def _has_one(self, quick: bool) -> bool:
        if quick:
            return bool(self._kept or self._others)
        return len(self._others) > max(0, self._quick_waiting - len(self._kept))


R = TypeVar("R")
A = TypeVar("A")


@dataclass(eq=False)
class WaitingRequest(Generic[R, A]):
    """A request, and where its answer goes."""

    request: R
    key: object = None
    """What requests have in common that may be taken together; None: it is taken alone."""
    began: float = 0.0
    """The earliest goes first, and of equals the one that came first."""
    answer: Future[A] = field(default_factory=Future)


class WaitingRequests(Generic[R, A]):
    """A queue: what was begun first is served first, and with it others of its key. Any thread may ask.

    If all that is under way went on at the same pace, all of it would end late.
    """

    def __init__(self, most: int) -> None:
        """`most`: that are taken together."""
        self._most = most
        self._lock = threading.Lock()
        self._waiting: list[WaitingRequest[R, A]] = []

    def add(self, waiting: WaitingRequest[R, A]) -> None:
        """One more."""
        with self._lock:
            self._waiting.append(waiting)

    def take(self, workers: int) -> list[WaitingRequest[R, A]]:
        """The first that was not cancelled, with some of its key: the more of them, the longer the queue is for so many
        `workers`, none where each of the others could have a worker of its own. Their futures run from here on.

        Empty where nothing waits.
        """
        with self._lock:
            taken: list[WaitingRequest[R, A]] = []
            while self._waiting and not taken:
                first = min(self._waiting, key=lambda w: w.began)
                self._waiting.remove(first)
                if first.answer.set_running_or_notify_cancel():
                    taken.append(first)
            if not taken or taken[0].key is None:
                return taken
            waiting = [w for w in self._waiting if not w.answer.cancelled()]
            most = min(self._most, 1 + len(waiting) // workers)
            alike = [w for w in waiting if w.key == taken[0].key]
            for one in alike[: most - 1]:
                self._waiting.remove(one)
                if one.answer.set_running_or_notify_cancel():
                    taken.append(one)
            return taken

    def cancel(self) -> None:
        """Cancel all that wait."""
        with self._lock:
            cancelled, self._waiting = self._waiting, []
        for one in cancelled:
            if one.answer.cancel():
                one.answer.set_running_or_notify_cancel()  # or `concurrent.futures.wait` would go on waiting
