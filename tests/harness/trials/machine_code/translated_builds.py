"""Kernels that are compiled for real, with machine code of the fake driver in place of a device's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from benchmarks.lib.machine_code import fake_code as code
from forecast_harness.clocks.compilation.workers import BuildRequest, BuildResult, CompileWorkers
from forecast_harness.clocks.records import Program
from forecast_harness.sandbox.jobs import JobResult, ResourceLimits, SandboxJob
from tests.harness.trials.machine_code.judged_sums import QuickBuilds


class TranslatedBuilder(QuickBuilds):
    """Compiles kernels of the parameters (x, out, n) that write multiples of x.

    The factor and the nanoseconds that a launch takes are read from the source: `3 * tl.load` or `3 * x[`, and
    `# 40000 ns` or `// 40000 ns`.
    """

    def __init__(self, workers: CompileWorkers) -> None:
        self.count = 2
        self._workers, self._pool = workers, ThreadPoolExecutor(2)

    @property
    def idle(self) -> int:
        return self._workers.idle

    def submit(self, request: BuildRequest) -> Future[BuildResult]:
        return self._pool.submit(self._build, request)

    def run_jobs(self, jobs: Sequence[SandboxJob], limits: ResourceLimits) -> list[JobResult]:
        return self._workers.run_jobs(jobs, limits)

    def close(self) -> None:
        self._pool.shutdown()

    def _build(self, request: BuildRequest) -> BuildResult:
        built = self._workers.submit(request).result(120)
        return replace(built, programs=tuple(_translated(p, request.source) for p in built.programs))


class StartedBuilder(TranslatedBuilder):
    """With workers of its own, in the place of `CompileWorkers`."""

    def __init__(self, count: int) -> None:
        self._own = CompileWorkers(count=count)
        super().__init__(self._own)

    def start(self) -> StartedBuilder:
        self._own.start()
        return self

    @property
    def device(self) -> Mapping[str, Any]:
        return self._own.device

    @device.setter
    def device(self, facts: Mapping[str, Any]) -> None:
        self._own.device = dict(facts)

    def close(self) -> None:
        super().close()
        self._own.close()


def _translated(program: Program, source: str) -> Program:
    factor = re.search(r"([\d.]+) \* (?:tl\.load|x\[)", source)
    cost = re.search(r"(?:#|//) (\d+) ns", source)
    operations = [
        code.scale(1, 0, int(1000 * float(factor[1])) if factor else 1000, 2),
        code.spend(int(cost[1]) if cost else 50_000),
    ]
    (kernel,) = program.kernels
    kinds = (*kernel.parameters, *["*i8"] * kernel.scratch_parameters)
    image = code.image(kernel.name, kinds, operations)
    return replace(program, kernels=(replace(kernel, image=image),))
