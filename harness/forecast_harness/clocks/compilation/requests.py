"""Requests to a compile worker and its answers: a source in one config, and its programs, one for each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forecast_autotune.records.codec import Record
from forecast_harness.clocks.compilation.cubin import check_cubin, without_references
from forecast_harness.clocks.compilation.nvcc import CudaBuild
from forecast_harness.clocks.records import CompiledKernel, LaunchPlan, MachineCodeError, Program
from forecast_harness.sandbox.jobs import JobResult, JobStatus, byte_size

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
    """When what it is for was begun, by a clock that all share: of requests that wait, the earliest goes first."""

    def only(self, cases: Sequence[int]) -> BuildRequest:
        """For the cases of these numbers; not for CUDA, which is compiled once for all."""
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
    """Why it is no solution of kernels alone: it takes the way of host code."""
    infrastructure: str = ""
    """Our failure: nothing is known of the candidate."""
    seconds: float = 0.0


def read_answer(request: BuildRequest, result: JobResult) -> BuildResult:
    """Check all that a cell has said of a request.

    Raises `MachineCodeError` and the like for what is no answer.
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
                CompiledKernel.from_json(one),
                image=without_references(bytes(result.arrays[f"{place}/code-{n}"].data)),
            )
            for n, one in enumerate(value["kernels"])
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
