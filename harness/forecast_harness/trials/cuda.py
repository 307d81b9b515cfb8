"""Nodes of a CUDA kernel in a sandbox lane: compiled there without a device, then judged as a pack's solutions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError, SettingsError
from forecast_autotune.records import Device
from forecast_harness.clocks.compilation.cubin_solution import host_solution
from forecast_harness.clocks.compilation.nvcc import (
    COMPILE_LIMITS,
    CompiledSource,
    CompilerUnavailable,
    CudaBuild,
    CudaCompileError,
    compile_source,
)
from forecast_harness.clocks.compilation.workers import BuildRequest
from forecast_harness.records import Node, NodeJob, SearchTarget
from forecast_harness.sandbox.api import JobResult, SandboxError, SandboxJob, SandboxLane
from forecast_harness.targets.cuda.source import KernelSignature, cuda_configs
from forecast_harness.targets.packs.schema import Solution
from forecast_harness.targets.search_target import cuda_signature_of
from forecast_harness.trials.bench import ContestUnavailable
from forecast_harness.trials.configs.source_configs import SourceConfig
from forecast_harness.trials.machine_code.targets import PreparedCall
from forecast_harness.trials.packs import PackJudge
from forecast_harness.trials.protocol import LaneFailure
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.verdict import Reason, ReasonCode, SolutionVerdict


class CudaJudge(PackJudge):
    """A `PackJudge` of CUDA sources. Use from one thread at a time."""

    def __init__(self, target: SearchTarget, plan: VerificationPlan, folder: Path, **more: Any) -> None:
        """Raises as `PackJudge` does, `SandboxError`, and `SettingsError` where the target's device is not known."""
        device = Device.from_json(target.payload["device"])
        if not device.arch.isdigit():
            raise SettingsError(
                f"{target.name}: the compute capability of {device.name} is not known, so that nothing can be compiled "
                "for it: is its driver (libcuda.so.1) there?"
            )
        self._signature, self._arch = cuda_signature_of(target), int(device.arch)
        self.requests = CudaRequests(self._signature)
        """Requests to compile the sources of solutions, for contests through machine code."""
        self._builds: dict[tuple[str, str], CompiledSource | CudaCompileError] = {}
        self._compiler = SandboxLane(scratch=folder)
        super().__init__(target, plan, folder, **more)
        try:
            self._compiler.__enter__()
        except BaseException:
            super().close()
            raise

    def close(self) -> None:
        """End all processes of both lanes."""
        try:
            super().close()
        finally:
            self._compiler.__exit__(None, None, None)

    def _own_configs(self, source: str) -> list[SourceConfig]:
        try:
            return list(cuda_configs(source))
        except RecordError:  # the compilation raises it again
            return []

    def _choose_configs(
        self, job: NodeJob, configs: Sequence[SourceConfig], n: int
    ) -> Sequence[SourceConfig]:
        """The configs that a pack's judge chooses, without those that do not compile."""
        candidates = super()._choose_configs(job, configs, n)
        return [c for c in candidates if isinstance(self._compile(job.node, c), CompiledSource)] or [{}]

    def _verify_node(self, node: Node, config: SourceConfig, plan: VerificationPlan) -> SolutionVerdict:
        began = time.perf_counter()
        if isinstance(result := self._compile(node, config), CudaCompileError):
            reason = Reason(ReasonCode.FAILS, f"CompilationError: {result}")
            seconds = time.perf_counter() - began
            return SolutionVerdict(self._target.name, node.id, (reason,), seconds=seconds)
        return super()._verify_node(node, config, plan)

    def _solution(self, node: Node, config: SourceConfig) -> Solution:
        if isinstance(build := self._compile(node, config), CudaCompileError):
            raise LaneFailure(f"{node.id} does not compile: {build}", self.name)
        result = host_solution(node.id, build, self._signature, config)
        return self.requests.note(result, node.source, config)

    def _compile(self, node: Node, config: SourceConfig) -> CompiledSource | CudaCompileError:
        """Machine code of a node in one config, made once. Raises `LaneFailure`."""
        key = node.id, repr(sorted(config.items()))
        if key not in self._builds:
            try:
                self._builds[key] = compile_source(
                    node.source, self._signature, config, self._arch, self._run_compiler
                )
            except CudaCompileError as error:
                self._builds[key] = error
            except (CompilerUnavailable, SandboxError, SettingsError) as error:
                raise LaneFailure(str(error), self.name) from error
        return self._builds[key]

    def _run_compiler(self, job: SandboxJob) -> JobResult:
        return self._compiler.run(job, COMPILE_LIMITS)


class CudaRequests:
    """Compile requests for solutions of one CUDA kernel, each of which `note` has to know first."""

    def __init__(self, signature: KernelSignature) -> None:
        self._signature = signature
        self._sources: dict[str, tuple[str, Mapping[str, int]]] = {}

    def note(self, solution: Solution, source: str, config: Mapping[str, int]) -> Solution:
        """Remember what a solution was made of; the solution itself."""
        self._sources[solution.id] = source, dict(config)
        return solution

    def __call__(self, name: str, solution: Solution, calls: Mapping[str, PreparedCall]) -> BuildRequest:
        """The request to compile a solution for these calls. Raises `ContestUnavailable` for an unknown solution."""
        if (origin := self._sources.get(solution.id)) is None:
            raise ContestUnavailable(f"{solution.name} was made of no CUDA source that is known here")
        source, config = origin
        axes = tuple(dict(call.case.sizes or {}) for call in calls.values())
        cases = tuple(call.arguments for call in calls.values())
        build = CudaBuild(self._signature, config, axes)
        return BuildRequest(name, source, self._signature.entry, cases, cuda=build)
