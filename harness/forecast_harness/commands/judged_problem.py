"""What `verify` and `bench` judge: a pack, or a CUDA kernel with a declared signature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forecast_autotune.commands.output import CommandError, UsageError
from forecast_autotune.errors import RecordError
from forecast_autotune.records.named_lines import read_document
from forecast_harness.targets.cuda.declaration import CUDA_PLACE, CudaDeclaration, read_cuda_declaration

if TYPE_CHECKING:
    from forecast_harness.targets.packs.schema import Pack, Solution
    from forecast_harness.trials.machine_code.cuda_requests import CudaRequests
    from forecast_harness.verify.plan import VerificationPlan

_BASE = "base"


@dataclass
class JudgedProblem:
    """A pack, and how sources become its solutions."""

    pack: Pack
    declared: CudaDeclaration | None = None
    request_of: CudaRequests | None = None
    """How CUDA sources are compiled for contests through machine code."""

    def cuda_solutions(self, names: Sequence[str], plan: VerificationPlan) -> list[Solution]:
        """CUDA sources, each in its first config: files, or `base` for the kernel's own.

        Raises `UsageError` without a CUDA device and for what is no file, and `CommandError` for a source that does
        not compile.
        """
        assert self.declared is not None
        if not names:
            return []
        if plan.device == "cpu":
            raise UsageError(
                "CUDA sources are launched on a CUDA device: leave out the SOLUTION to check the declaration alone, or "
                "give --device a number"
            )
        from forecast_harness.clocks.compilation.cubin_solution import host_solution
        from forecast_harness.clocks.compilation.nvcc import COMPILE_LIMITS, CudaCompileError, compile_source
        from forecast_harness.sandbox.api import SandboxLane
        from forecast_harness.targets.search_target import cuda_device
        from forecast_harness.trials.machine_code.cuda_requests import CudaRequests

        signature, arch = self.declared.signature, cuda_device().arch
        if not arch.isdigit():
            raise CommandError("the driver does not tell the device's compute capability")
        requests = self.request_of = CudaRequests(signature)
        found = []
        with SandboxLane() as lane:
            for name in names:
                source = self._source(name)
                try:
                    made = compile_source(
                        source, signature, {}, int(arch), lambda job: lane.run(job, COMPILE_LIMITS)
                    )
                except CudaCompileError as error:
                    raise CommandError(f"{name} does not compile: {error}") from error
                solution = host_solution(Path(name).stem, made, signature, {})
                found.append(requests.note(solution, source, {}))
        return found

    def _source(self, name: str) -> str:
        assert self.declared is not None
        if name == _BASE:
            return self.declared.source
        path = Path(name)
        if path.suffix != ".cu" or not path.is_file():
            raise UsageError(f"{name} is no CUDA source: give FILE.cu, or {_BASE} for the kernel's own")
        try:
            return read_document(path).replace("\r\n", "\n")
        except RecordError as error:
            raise UsageError(f"{name}: {error}") from error


def open_problem(text: str) -> JudgedProblem:
    """The problem that a text of the command line names. Raises `RecordError`, `SettingsError`."""
    if CUDA_PLACE.match(text):
        declared = read_cuda_declaration(text)
        return JudgedProblem(declared.pack, declared)
    from forecast_harness.targets.packs import load_pack

    return JudgedProblem(load_pack(text))
