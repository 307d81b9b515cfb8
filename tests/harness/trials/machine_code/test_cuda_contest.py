"""Two CUDA sources beside each other through machine code: what a confirmation's first contest is."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

pytest.importorskip("torch")

from forecast_harness.clocks.compilation.cubin_solution import host_solution
from forecast_harness.clocks.compilation.nvcc import COMPILE_LIMITS, compile_source
from forecast_harness.clocks.compilation.workers import CompileWorkers
from forecast_harness.clocks.paired_comparison import DEFAULT_RULES
from forecast_harness.clocks.runner.client import RunnerClient
from forecast_harness.clocks.runner.health import facts_for_workers
from forecast_harness.targets.packs.load import make_solution
from forecast_harness.targets.packs.schema import Language
from forecast_harness.trials.bench import ContestUnavailable
from forecast_harness.trials.cuda import CudaRequests
from forecast_harness.trials.machine_code.pack_contest import PackContests
from forecast_harness.verify.plan import VerificationPlan
from tests.harness.cuda_kernels.declared_kernel import SOURCE, declared, needs_nvcc
from tests.harness.trials.machine_code.translated_builds import TranslatedBuilder


@pytest.mark.slow
@needs_nvcc
def test_a_contest_launches_the_sources_themselves(fake_driver: Path, tmp_path: Path) -> None:
    kernel = declared(tmp_path / "kernel")
    requests = CudaRequests(kernel.signature)
    other = SOURCE.replace("at < n)", "at < n && x[at] != 7.5f)")  # other machine code is another solution
    faster = f"{other}// 20000 ns\n"
    with (
        RunnerClient(str(fake_driver), launch_s=60.0, flush_bytes=1 << 20) as runner,
        CompileWorkers(facts_for_workers(runner), 1) as workers,
        contextlib.closing(TranslatedBuilder(workers)) as builder,
    ):
        results = []
        for name, source in (("base", SOURCE), ("faster", faster)):
            compiled = compile_source(
                source, kernel.signature, {}, 90, lambda job: workers.run_jobs([job], COMPILE_LIMITS)[0]
            )
            solution = host_solution(name, compiled, kernel.signature, {})
            assert (solution.language, solution.entry) == (Language.CUDA, "run")
            results.append(requests.note(solution, source, {}))
        contests = PackContests(kernel.pack, VerificationPlan(cases=1), DEFAULT_RULES, request_of=requests)
        value = contests.compare(runner, builder, tmp_path, *results)
    assert value["duel"]["outcome"] == "faster"
    assert value["duel"]["gain"] > 0.8
    assert set(value["protocols"].values()) == {"machine-code"}


def test_a_solution_of_an_unknown_source_is_timed_elsewhere(tmp_path: Path) -> None:
    requests = CudaRequests(declared(tmp_path).signature)
    with pytest.raises(ContestUnavailable, match="made of no CUDA source"):
        requests("0", make_solution("other", "def run(x, y): ...\n"), {})
