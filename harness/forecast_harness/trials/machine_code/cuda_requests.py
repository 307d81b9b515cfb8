"""Which CUDA source a solution was made of: contests compile that again, and launch it without the solution."""

from __future__ import annotations

from collections.abc import Mapping

from forecast_harness.clocks.compilation.nvcc import CudaBuild
from forecast_harness.clocks.compilation.requests import BuildRequest
from forecast_harness.targets.cuda.signature import KernelSignature
from forecast_harness.targets.packs.schema import Solution
from forecast_harness.trials.bench import ContestUnavailable
from forecast_harness.trials.machine_code.pack_calls import PreparedCall


class CudaRequests:
    """Requests for solutions of one CUDA kernel; `note` comes before."""

    def __init__(self, signature: KernelSignature) -> None:
        self._signature = signature
        self._sources: dict[str, tuple[str, Mapping[str, int]]] = {}

    def note(self, solution: Solution, source: str, config: Mapping[str, int]) -> Solution:
        """Remember what a solution was made of; the solution itself."""
        self._sources[solution.id] = source, dict(config)
        return solution

    def __call__(self, name: str, solution: Solution, calls: Mapping[str, PreparedCall]) -> BuildRequest:
        """How it is compiled for these calls. Raises `ContestUnavailable` for a solution that is not known."""
        if (known := self._sources.get(solution.id)) is None:
            raise ContestUnavailable(f"{solution.name} was made of no CUDA source that is known here")
        source, config = known
        axes = tuple(dict(call.case.sizes or {}) for call in calls.values())
        cases = tuple(call.arguments for call in calls.values())
        build = CudaBuild(self._signature, config, axes)
        return BuildRequest(name, source, self._signature.entry, cases, cuda=build)
