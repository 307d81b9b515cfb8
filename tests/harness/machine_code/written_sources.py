"""Sources whose text says what their machine code does, for a builder that compiles nothing."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from benchmarks.lib.machine_code import fake_code as code
from benchmarks.lib.machine_code.fake_code import addition, honest
from benchmarks.lib.machine_code.sums import COUNT
from forecast_harness.machine_code.compilation.build_requests import BuildRequest, BuildResult
from tests.harness.machine_code.quick_builds import QuickBuilds

SMALL = 64
"""Elements of the call that is checked."""


class WrittenBuilder(QuickBuilds):
    """Compiles sources such as `honest 50000`: what the kernel does, and ns that it takes at 4 warps."""

    count = 2

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
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
        wrong = [code.copy((2, 0), (0, 0), 4 * SMALL), code.spend(ns)]
        operations = {
            "honest": honest(ns),
            "wrong": wrong,
            "late": honest(ns),
            "faulty": [code.fail(700)],
            "wide": honest(ns) if warps == 4 else [code.fail(700)],
        }[kind]
        large = wrong if kind == "late" else operations
        cases = ((operations, SMALL), (large, COUNT))
        return BuildResult(request, tuple(addition(request.candidate, *case) for case in cases))
