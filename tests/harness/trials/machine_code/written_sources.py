"""Sources whose text says what their machine code does, for a builder that compiles nothing."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from benchmarks.lib.machine_code import fake_code as code
from benchmarks.lib.machine_code.fake_code import addition, honest
from benchmarks.lib.machine_code.sums import COUNT
from forecast_harness.clocks.compilation.requests import BuildRequest, BuildResult
from tests.harness.trials.machine_code.quick_builds import QuickBuilds

SMALL = 64
"""Elements of the call that is checked."""


class WrittenBuilder(QuickBuilds):
    """Compiles sources such as `honest 50000`: what the kernel does, and ns that it takes at 4 warps."""

    count = 2

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.counts: list[tuple[str, int, list[int]]] = []
        """Candidate, warps, and the elements of the calls that it was compiled for."""
        self._pool = ThreadPoolExecutor(2)

    @property
    def idle(self) -> int:
        return 0

    def submit(self, request: BuildRequest) -> Future[BuildResult]:
        return self._pool.submit(self._build, request)

    def close(self) -> None:
        self._pool.shutdown()

    def _build(self, request: BuildRequest) -> BuildResult:
        warps = int(request.options.get("num_warps", 4))
        self.asked.append((request.candidate, warps))
        kind, _, cost = request.source.partition(" ")
        if kind == "broken":
            return BuildResult(request, error="CompilationError: no such name")
        if kind == "odd":
            return BuildResult(request, error="RuntimeError: no such device")
        if kind == "host":
            return BuildResult(request, host_code="torch.mm computes on data")
        if kind == "lost":
            return BuildResult(request, infrastructure="the server was lost")
        ns = int(cost or 50_000) * 4 // warps
        counts = [case.tensors["x"].shape[0] for case in request.cases]
        self.counts.append((request.candidate, warps, counts))
        results = [(_operations(kind, ns, warps, count), count) for count in counts]
        return BuildResult(request, tuple(addition(request.candidate, *case) for case in results))


def _operations(kind: str, ns: int, warps: int, count: int) -> list[code.Operation]:
    wrong = [code.copy((2, 0), (0, 0), 4 * SMALL), code.spend(ns)]
    if kind == "wrong" or (kind == "late" and count > SMALL):
        return wrong
    if kind == "faulty" or (kind == "wide" and warps != 4):
        return [code.fail(700)]
    # One program for large calls and another one for all others, as where a kernel is specialised.
    if kind == "narrow" and count < COUNT and warps == 16:
        return wrong
    return honest(ns + 1 if kind in ("special", "narrow") and count < COUNT else ns)
