"""Compilation of candidates in sandboxed workers without a device, as many at once as there are processors."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError, SettingsError
from forecast_autotune.records.codec import Record
from forecast_harness.cuda_kernels.compilation import (
    COMPILE_LIMITS,
    CudaBuild,
    CudaCompileError,
    compile_source,
    launched_programs,
)
from forecast_harness.machine_code.compilation.cubin_sections import check_cubin, without_references
from forecast_harness.machine_code.compilation.free_lanes import FreeLanes
from forecast_harness.machine_code.compilation.kept_answers import KeptAnswers
from forecast_harness.machine_code.records import (
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
    ResourceLimits,
    SandboxError,
    SandboxJob,
    byte_size,
)
from forecast_harness.sandbox.lane import SandboxLane
from forecast_harness.sandbox.lane_pools import close_lanes, end_pools

SOURCE_FILE = "solution.py"
_JOB_ENTRY = "forecast_harness.machine_code.recording.job:main"
_WARM = (
    "torch",
    "triton",
    "forecast_harness.machine_code.recording.warm_up",
    "forecast_harness.machine_code.recording.job",
    "forecast_harness.search.judging.kernels.cell",
    "forecast_harness.search.judging.kernels.race",
    "forecast_autotune.features.trace",
)
"""What builds and traces import."""
LONG_S = 0.5
"""After which a job that nobody waits for is ended; a lane takes as long to be ready for another one."""
_NICENESS = 10
"""There are as many as processors: what launches and times must not wait for one."""
_WORKERS_PER_KEPT = 8
"""For so many workers there is one more that does other jobs alone: what is to be compiled next depends on those."""
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
        """Of its buffer."""
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
    choice: int = 0
    """Which config a decorated kernel takes."""
    launches: tuple[Mapping[str, Any], ...] = ()
    """Where `entry` is a kernel and not a function that launches some: its grid, scalars, meta-parameters and
    options at each case, as `TimedCall.launch` has them."""
    cuda: CudaBuild | None = None
    """Where the source is CUDA C++: how its kernel is called."""


@dataclass(frozen=True)
class BuildResult:
    """What became of a request: programs, one for each case, or why there are none."""

    request: BuildRequest
    programs: tuple[Program, ...] = ()
    error: str = ""
    """Why the source cannot be compiled, or breaks a rule: a failure of the candidate's."""
    host_code: str = ""
    """Why it is no solution of kernels alone: it takes the way of host code."""
    infrastructure: str = ""
    """Our failure: nothing is known of the candidate."""
    seconds: float = 0.0


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
        self._building: dict[Future[BuildResult], BuildRequest] = {}
        self._compiling: dict[int, SandboxLane] = {}
        """The lanes of requests under way, by the request's `id`."""
        self._closed = False
        self._scratch = scratch
        self._open: list[SandboxLane] = []
        self._to_open, self._opened = self.count, Future[None]()
        self.answers: KeptAnswers | None = None
        """Answers that need no worker."""

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
        end_pools((self._pool, self._beside), lambda: self.give_up(0.0))
        close_lanes(self._open)

    def give_up(self, after_s: float = LONG_S) -> None:
        """End the jobs that have taken so long already: nobody waits for them any more."""
        now = time.monotonic()
        for lane, began in list(self._began.items()):
            if now - began >= after_s:
                lane.give_up()

    def _open_lane(self, kept: bool = False) -> None:
        lane = SandboxLane(scratch=self._scratch, warm=_WARM, niceness=_NICENESS)
        lane.__enter__()
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
        """Compile one request on the next free worker, where its answer is not kept."""
        if self.answers is not None and request.cuda is None:
            with contextlib.suppress(SandboxError):
                if (kept := self.answers.get(self._job(request))) is not None:
                    done: Future[BuildResult] = Future()
                    done.set_result(self._answer(request, kept))
                    return done
        self._add_pending(1)
        submitted = self._pool.submit(self._build, request)
        self._building[submitted] = request
        submitted.add_done_callback(self._note_built)
        return submitted

    def _note_built(self, built: Future[BuildResult]) -> None:
        self._building.pop(built, None)
        self._add_pending(-1)

    def seconds_of(self, building: Future[BuildResult]) -> float:
        """For how long a compilation has been under way; 0 while it waits for a worker, and once it has ended."""
        with self._pending_lock:
            lane = self._compiling.get(id(self._building.get(building)))
            began = None if lane is None else self._began.get(lane)
        return 0.0 if began is None else time.monotonic() - began

    def end(self, building: Future[BuildResult]) -> None:
        """End a compilation that nobody waits for any more, so that its worker is free for another.

        One that waits for a worker and cannot be cancelled goes on.
        """
        if building.cancel() or (request := self._building.get(building)) is None:
            return
        with self._pending_lock:  # the lane is lent to no other job meanwhile
            if (lane := self._compiling.get(id(request))) is not None:
                lane.give_up()

    def _add_pending(self, count: int) -> None:
        with self._pending_lock:
            self._pending += count

    def run_jobs(self, jobs: Sequence[SandboxJob], limits: ResourceLimits) -> list[JobResult]:
        """Do other jobs of the sandbox, which are short, ahead of requests that wait.

        Raises `SandboxError` after the end.
        """
        self._add_pending(len(jobs))
        try:
            return list(self._beside.map(lambda job: self._kept_or_run(job, limits), jobs))
        except (CancelledError, RuntimeError) as error:
            raise SandboxError("the compile workers have ended") from error
        finally:
            self._add_pending(-len(jobs))

    def _kept_or_run(self, job: SandboxJob, limits: ResourceLimits) -> JobResult:
        kept = self.answers.get(job) if self.answers is not None else None
        return kept or self._run_job(job, limits, quick=True)

    def _run_job(
        self,
        job: SandboxJob,
        limits: ResourceLimits,
        quick: bool = False,
        request: BuildRequest | None = None,
    ) -> JobResult:
        """On the next free worker. Raises `SandboxError` where it is given up, and after the end."""
        lane = self._lanes.take(quick=quick)
        if lane is None:
            raise SandboxError(f"no compile worker has come: {self._opened.exception()}")
        try:
            if self._closed:
                raise SandboxError("the compile workers have ended")
            self._began[lane] = time.monotonic()
            if request is not None:
                self._compiling[id(request)] = lane
            result = lane.run(job, limits)
            if self.answers is not None:
                self.answers.put(job, result)
            return result
        finally:
            self._began.pop(lane, None)
            with self._pending_lock:
                self._compiling.pop(id(request), None)
            self._lanes.put(lane)

    def _build(self, request: BuildRequest) -> BuildResult:
        if request.cuda is not None:
            return self._build_cuda(request, request.cuda)
        try:
            result = self._run_job(self._job(request), COMPILE_LIMITS, request=request)
        except SandboxError as error:
            return BuildResult(request, infrastructure=str(error)[:2000])
        return self._answer(request, result)

    def _job(self, request: BuildRequest) -> SandboxJob:
        """Raises `SandboxError` for a request that cannot be told to a cell."""
        payload = {
            "file": SOURCE_FILE,
            "entry": request.entry,
            "device": self.device,
            "options": dict(request.options),
            "choice": request.choice,
            "cases": [c.to_json() for c in request.cases],
            "launches": [dict(one) for one in request.launches],
        }
        return SandboxJob(_JOB_ENTRY, payload, {SOURCE_FILE: request.source})

    def _answer(self, request: BuildRequest, result: JobResult) -> BuildResult:
        try:
            return read_answer(request, result)
        except (MachineCodeError, RecordError, ValueError, TypeError, KeyError) as error:
            said = f"the answer breaks a rule: {error}"[:2000]
            return BuildResult(request, error=said, seconds=result.seconds)

    def _build_cuda(self, request: BuildRequest, asked: CudaBuild) -> BuildResult:
        began, arch = time.monotonic(), int(self.device["arch"])
        cases = [(a, _buffers(c)) for a, c in zip(asked.axes, request.cases, strict=True)]
        try:
            compiled = compile_source(
                request.source,
                asked.signature,
                asked.config,
                arch,
                lambda job: self._run_job(job, COMPILE_LIMITS, request=request),
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


def read_answer(request: BuildRequest, result: JobResult) -> BuildResult:
    """Check all that a cell has said. Raises `MachineCodeError` and the like for what is no answer."""
    if result.status is JobStatus.INFRA_ERROR:
        return BuildResult(request, infrastructure=result.detail[:2000], seconds=result.seconds)
    if result.status is not JobStatus.OK:
        return BuildResult(request, error=result.detail[:2000], seconds=result.seconds)
    if not isinstance(result.value, list) or len(result.value) != len(request.cases):
        raise MachineCodeError(f"one answer is wanted for each of {len(request.cases)} cases")
    programs = []
    for number, (value, case) in enumerate(zip(result.value, request.cases, strict=True)):
        if "host_code" in value:
            return BuildResult(request, host_code=str(value["host_code"])[:500], seconds=result.seconds)
        kernels = tuple(
            replace(
                CompiledKernel.from_json(told),
                image=without_references(bytes(result.arrays[f"{number}/code-{n}"].data)),
            )
            for n, told in enumerate(value["kernels"])
        )
        plan = LaunchPlan.from_json(value["plan"])
        sizes = {n: buffer_bytes(t) for n, t in case.tensors.items()}
        plan.check(kernels, sizes, scratch_limit=MOST_SCRATCH_BYTES)
        for kernel in kernels:
            check_cubin(kernel)
        programs.append(Program(request.candidate, kernels, plan))
    return BuildResult(request, tuple(programs), seconds=result.seconds)


def _buffers(case: CallCase) -> list[PlanBuffer]:
    return [PlanBuffer(n, BufferRole(t.role), buffer_bytes(t)) for n, t in case.tensors.items()]


def buffer_bytes(tensor: TensorArgument) -> int:
    """Bytes of a tensor's buffer."""
    return byte_size(tensor.dtype, (tensor.elements,))
