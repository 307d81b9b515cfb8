"""Compilation of candidates in sandboxed workers without a device, as many at once as there are processors."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from typing import Any

from forecast_autotune.errors import RecordError, SettingsError
from forecast_autotune.processors import usable_processors
from forecast_autotune.records.codec import Record
from forecast_harness.clocks.compilation.cubin import check_cubin, without_references
from forecast_harness.clocks.compilation.nvcc import (
    COMPILE_LIMITS,
    CudaBuild,
    CudaCompileError,
    compile_source,
    launched_programs,
)
from forecast_harness.clocks.records import (
    BufferRole,
    CompiledKernel,
    LaunchPlan,
    MachineCodeError,
    PlanBuffer,
    Program,
)
from forecast_harness.sandbox.jobs import (
    JobResult,
    JobStatus,
    Resource,
    ResourceLimits,
    SandboxError,
    SandboxJob,
    byte_size,
)
from forecast_harness.sandbox.lane import SandboxLane
from forecast_harness.sandbox.lane_pools import OpeningLanes, close_lanes

MOST_SCRATCH_BYTES = 8 << 30


@dataclass(frozen=True)
class TensorArgument(Record, label="tensor argument", unknown="refuse"):
    """One tensor of a call: `late` elements lie before its first in its buffer."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    late: int = 0
    role: str = "input"

    @property
    def elements(self) -> int:
        """The elements of its buffer."""
        if 0 in self.shape:
            return max(0, self.late)
        return self.late + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True)
class CallCase(Record, label="call case", unknown="refuse"):
    """Arguments of one call, without values."""

    tensors: Mapping[str, TensorArgument]
    scalars: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BuildRequest:
    """A source to be compiled for some calls, in one config."""

    candidate: str
    source: str
    entry: str
    cases: tuple[CallCase, ...]
    options: Mapping[str, int] = field(default_factory=dict)
    """Triton's options of every launch, over those that the source gives."""
    launches: tuple[Mapping[str, Any], ...] = ()
    """Where `entry` is a kernel and not a function that launches some: its grid, scalars, meta-parameters and
    options at each case, as `TimedCall.launch` has them."""
    cuda: CudaBuild | None = None
    """Where the source is CUDA C++: how its kernel is called."""
    began: float = 0.0
    """When the job behind it began, by a clock that all share: of waiting requests, the earliest goes first."""

    def only(self, cases: Sequence[int]) -> BuildRequest:
        """The request for the cases of these numbers; not for CUDA, which is compiled once for all."""
        return replace(
            self,
            cases=tuple(self.cases[n] for n in cases),
            launches=tuple(self.launches[n] for n in cases) if self.launches else (),
        )


@dataclass(frozen=True)
class BuildResult:
    """The end of a request: programs, one for each case, or why there are none."""

    request: BuildRequest
    programs: tuple[Program, ...] = ()
    error: str = ""
    """Why the source cannot be compiled, or breaks a rule: a failure of the candidate's."""
    host_code: str = ""
    """Why the solution is not made of kernels alone, and has to run as host code."""
    infrastructure: str = ""
    """Our failure: nothing is known of the candidate."""
    seconds: float = 0.0


def read_answer(request: BuildRequest, result: JobResult) -> BuildResult:
    """Read and check a cell's answer to a request.

    Raises `MachineCodeError` and the like for a malformed one.
    """
    if result.status is JobStatus.INFRA_ERROR:
        return BuildResult(request, infrastructure=result.detail[:2000], seconds=result.seconds)
    if result.status is not JobStatus.OK:
        return BuildResult(request, error=result.detail[:2000], seconds=result.seconds)
    values = result.value
    if not isinstance(values, list) or len(values) != len(request.cases):
        raise MachineCodeError(f"one answer is wanted for each of {len(request.cases)} cases")
    programs = []
    for place, (value, case) in enumerate(zip(values, request.cases, strict=True)):
        if "host_code" in value:
            return BuildResult(request, host_code=str(value["host_code"])[:500], seconds=result.seconds)
        kernels = tuple(
            replace(
                CompiledKernel.from_json(facts),
                image=without_references(bytes(result.arrays[f"{place}/code-{n}"].data)),
            )
            for n, facts in enumerate(value["kernels"])
        )
        plan = LaunchPlan.from_json(value["plan"])
        sizes = {n: buffer_bytes(t) for n, t in case.tensors.items()}
        plan.check(kernels, sizes, scratch_limit=MOST_SCRATCH_BYTES)
        for kernel in kernels:
            check_cubin(kernel)
        programs.append(Program(request.candidate, kernels, plan))
    return BuildResult(request, tuple(programs), seconds=result.seconds)


def buffer_bytes(tensor: TensorArgument) -> int:
    """Bytes of a tensor's buffer."""
    return byte_size(tensor.dtype, (tensor.elements,))


# --- workers ---


SOURCE_FILE = "solution.py"
_JOB_ENTRY = "forecast_harness.clocks.recording.solution:main"
_WARM = (
    "torch",
    "triton",
    "forecast_harness.clocks.recording.warm_up",
    "forecast_harness.clocks.recording.solution",
    "forecast_harness.trials.kernel_cell",
    "forecast_harness.trials.race_job",
    "forecast_autotune.features.trace",
)
"""Modules that builds and traces import."""
LONG_S = 0.5
"""Seconds after which a job that nobody waits for is ended: a lane takes as long to be ready for another one."""
_NICENESS = 10
"""There are as many workers as processors, and launches that are timed must not wait for one."""
_GIVE_UP_AGAIN_S = 0.2
_FIRST = -math.inf
"""Jobs with this time go before all requests: they are short, and the next requests depend on them."""


@dataclass(order=True)
class _Task:
    """Work that waits for a worker: the work that began first is served first, and of equals the first to come.

    If all work went on at the same pace, all of it would end late.
    """

    began: float
    number: int
    work: Callable[[SandboxLane | None], Any] = field(compare=False)
    """The work on a lane; None: no worker has come."""
    answer: Future[Any] = field(compare=False, default_factory=Future)


class CompileWorkers(Resource):
    """Workers that compile; use as a context manager, or `open` and `close` it. `submit` never blocks."""

    def __init__(self, device: Mapping[str, Any] | None = None, count: int = 0) -> None:
        """`device`: `arch` (90 for sm_90), `properties` as Triton has them; None: it is set before `submit`.

        `count`: 0 for all processors.
        """
        self.count = count or usable_processors()
        self.device = dict(device or {})
        self._condition = threading.Condition()
        self._waiting: list[_Task] = []
        self._numbers = itertools.count()
        self._running: dict[Future[Any], tuple[SandboxLane, float]] = {}
        """The lane of each running job, and the time of its start."""
        self._pending = 0
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._open: list[SandboxLane] = []
        self._opening = OpeningLanes()
        self._to_open, self._first_worker = self.count, Future[None]()

    def __enter__(self) -> CompileWorkers:
        return self.open()

    def open(self) -> CompileWorkers:
        """Wait for the first worker; the others come while it works. Raises `SandboxError` where none comes."""
        self.start()
        if (failure := self._first_worker.exception()) is not None:
            self.close()
            raise failure
        return self

    def start(self) -> CompileWorkers:
        """Open workers in the background: requests wait for one, and fail where none comes."""
        self._threads = [
            threading.Thread(target=self._serve, name="compile", daemon=True) for _ in range(self.count)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        """End all workers and their jobs; waiting ones are cancelled."""
        self._opening.give_up()
        with self._condition:
            self._closed = True
            waiting, self._waiting = self._waiting, []
            self._condition.notify_all()
        for task in waiting:
            if task.answer.cancel():
                task.answer.set_running_or_notify_cancel()  # or `concurrent.futures.wait` would go on waiting
        for thread in self._threads:
            while thread.is_alive():  # again, as the first call misses a lane that is about to begin a job
                self.give_up(0.0)
                thread.join(_GIVE_UP_AGAIN_S)
        close_lanes(self._open)

    @property
    def idle(self) -> int:
        """Workers without a request."""
        return max(0, self.count - self._pending)

    def submit(self, request: BuildRequest) -> Future[BuildResult]:
        """Compile a request on the next free worker, after those begun earlier. Raises `RuntimeError` after the end."""
        return self._add(lambda lane: self._build(request, lane), request.began)

    def run_jobs(self, jobs: Sequence[SandboxJob], limits: ResourceLimits) -> list[JobResult]:
        """Do other jobs of the sandbox, which are short, ahead of requests that wait.

        Raises `SandboxError` after the end.
        """

        def work_of(job: SandboxJob) -> Callable[[SandboxLane | None], JobResult]:
            return lambda lane: self._run(lane, job, limits)

        try:
            running = [self._add(work_of(job), _FIRST) for job in jobs]
            return [future.result() for future in running]
        except (CancelledError, RuntimeError) as error:
            raise SandboxError("the compile workers have ended") from error

    def seconds_of(self, building: Future[BuildResult]) -> float:
        """Seconds of a compilation so far; 0 while it waits for a worker, and once it has ended."""
        with self._condition:
            running = self._running.get(building)
        return 0.0 if running is None else time.monotonic() - running[1]

    def end(self, building: Future[BuildResult]) -> bool:
        """End a compilation that nobody waits for, to free its worker for another; returns whether it ends."""
        if building.cancel():
            return True
        with self._condition:  # the lane is lent to no other job meanwhile
            running = self._running.get(building)
            if running is not None:
                running[0].give_up()
        return running is not None

    def give_up(self, after_s: float = LONG_S) -> None:
        """End the jobs that have taken so many seconds: nobody waits for them any more."""
        with self._condition:
            for lane, began in self._running.values():
                if time.monotonic() - began >= after_s:
                    lane.give_up()

    def _add(self, work: Callable[[SandboxLane | None], Any], began: float) -> Future[Any]:
        with self._condition:
            if self._closed:
                raise RuntimeError("the compile workers have ended")
            task = _Task(began, next(self._numbers), work)
            self._pending += 1
            heapq.heappush(self._waiting, task)
            self._condition.notify()
        task.answer.add_done_callback(self._note_done)
        return task.answer

    def _note_done(self, answer: Future[Any]) -> None:
        with self._condition:
            self._pending -= 1

    # --- a worker ---

    def _serve(self) -> None:
        lane: SandboxLane | None = None
        try:
            lane = self._open_lane()
        except BaseException as error:
            if not self._is_last_failure(error):
                return
        while (task := self._next()) is not None:
            with self._condition:
                if lane is not None:
                    self._running[task.answer] = lane, time.monotonic()
            try:
                result = task.work(lane)
            except BaseException as error:
                self._leave(task)
                task.answer.set_exception(error)
            else:
                self._leave(task)
                task.answer.set_result(result)

    def _open_lane(self) -> SandboxLane:
        lane = SandboxLane(warm=_WARM, niceness=_NICENESS)
        self._opening.enter(lane)
        with self._condition:
            self._open.append(lane)
            self._to_open -= 1
            if not self._first_worker.done():
                self._first_worker.set_result(None)
        return lane

    def _is_last_failure(self, error: BaseException) -> bool:
        """Whether no worker has come, and none will: this thread then fails all waiting work."""
        with self._condition:
            self._to_open -= 1
            if self._to_open or self._first_worker.done():
                return False
            self._first_worker.set_exception(error)
            return True

    def _next(self) -> _Task | None:
        """The first task that was not cancelled; waits for one. None after the end."""
        with self._condition:
            while not self._closed:
                while self._waiting:
                    task = heapq.heappop(self._waiting)
                    if task.answer.set_running_or_notify_cancel():
                        return task
                self._condition.wait()
        return None

    def _leave(self, task: _Task) -> None:
        with self._condition:
            self._running.pop(task.answer, None)

    def _run(self, lane: SandboxLane | None, job: SandboxJob, limits: ResourceLimits) -> JobResult:
        """Run a job. Raises `SandboxError` where it is given up, and where there is no worker."""
        if lane is None:
            raise SandboxError(f"no compile worker has come: {self._first_worker.exception()}")
        if self._closed:
            raise SandboxError("the compile workers have ended")
        return lane.run(job, limits)

    def _build(self, request: BuildRequest, lane: SandboxLane | None) -> BuildResult:
        try:
            if request.cuda is not None:
                return self._build_cuda(request, request.cuda, lane)
            result = self._run(lane, self._job(request), COMPILE_LIMITS)
        except (SandboxError, SettingsError) as error:
            return BuildResult(request, infrastructure=str(error)[:2000])
        try:
            return read_answer(request, result)
        except (MachineCodeError, RecordError, ValueError, TypeError, LookupError) as error:
            detail = f"the answer breaks a rule: {error}"[:2000]
            return BuildResult(request, error=detail, seconds=result.seconds)

    def _job(self, request: BuildRequest) -> SandboxJob:
        """The job of a request. Raises `SandboxError` for one that cannot be sent to a cell."""
        payload = {
            "file": SOURCE_FILE,
            "entry": request.entry,
            "device": self.device,
            "cases": [c.to_json() for c in request.cases],
            "options": dict(request.options),
            "launches": [dict(launch) for launch in request.launches],
        }
        return SandboxJob(_JOB_ENTRY, payload, {SOURCE_FILE: request.source})

    def _build_cuda(self, request: BuildRequest, build: CudaBuild, lane: SandboxLane | None) -> BuildResult:
        began, arch = time.monotonic(), int(self.device["arch"])
        cases = [(a, _buffers(c)) for a, c in zip(build.axes, request.cases, strict=True)]
        try:
            code = compile_source(
                request.source,
                build.signature,
                build.config,
                arch,
                lambda job: self._run(lane, job, COMPILE_LIMITS),
            )
            programs = launched_programs(request.candidate, code, build.signature, arch, cases, build.config)
        except CudaCompileError as error:
            detail = f"CompilationError: {error}"[:2000]
            return BuildResult(request, error=detail, seconds=time.monotonic() - began)
        return BuildResult(request, programs, seconds=time.monotonic() - began)


def _buffers(case: CallCase) -> list[PlanBuffer]:
    return [PlanBuffer(n, BufferRole(t.role), buffer_bytes(t)) for n, t in case.tensors.items()]
