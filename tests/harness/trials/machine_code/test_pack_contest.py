"""Contests of a pack's solutions through machine code: compiled by Triton, launched by a fake driver."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from benchmarks.lib.machine_code import fake_code as code
from benchmarks.lib.machine_code.fake_code import image
from forecast_harness.clocks.compilation.cubin_solution import host_solution
from forecast_harness.clocks.compilation.nvcc import COMPILE_LIMITS, compile_source
from forecast_harness.clocks.compilation.workers import BuildRequest, BuildResult, CompileWorkers
from forecast_harness.clocks.paired_comparison import DEFAULT_RULES, StoppingRules, run_comparison
from forecast_harness.clocks.records import (
    BufferRole,
    CompiledKernel,
    KernelArgument,
    LaunchPlan,
    PlanBuffer,
    PlanStep,
    Program,
    ReturnedTensor,
)
from forecast_harness.clocks.runner.client import RunnerClient, facts_for_workers
from forecast_harness.targets.packs.load import load_pack, make_solution
from forecast_harness.targets.packs.schema import Language, Pack, Solution, Workload
from forecast_harness.targets.search_target import open_target
from forecast_harness.trials import bench
from forecast_harness.trials import machine_lanes as opening
from forecast_harness.trials.bench import ContestUnavailable
from forecast_harness.trials.cuda import CudaRequests
from forecast_harness.trials.machine_code import pack_contest
from forecast_harness.trials.machine_code.pack_contest import PackContests
from forecast_harness.trials.packs import PackJudge
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.timing_job import is_plausible
from forecast_harness.verify.verdict import CheckedLaunches, SolutionVerdict
from tests.harness.clocks.simulated_clock import SimulatedPairedClock
from tests.harness.cuda_kernels.declared_kernel import SOURCE, declared, needs_nvcc
from tests.harness.trials.machine_code.judged_sums import QuickBuilds
from tests.harness.trials.machine_code.translated_builds import TranslatedBuilder

M, N = 4, 32
RULES = StoppingRules(first=2, second=4, least=6, enough=10, most=12)
DOUBLES = "def reference(x):\n    return 2 * x\n"


class WrittenDoubles(QuickBuilds):
    """Compiles sources such as `2 40000`: the factor that x is multiplied with, and ns."""

    count = 1

    idle = 0

    def submit(self, request: BuildRequest) -> Future[BuildResult]:
        done: Future[BuildResult] = Future()
        if request.source == "host":
            done.set_result(BuildResult(request, host_code="torch.mm computes on data"))
            return done
        factor, cost = map(int, request.source.split())
        kinds = ("*fp32", "*fp32", "i32")
        result = image("kernel", kinds, [code.scale(1, 0, 1000 * factor, 2), code.spend(cost)])
        kernel = CompiledKernel("kernel", 90, kinds, image=result)
        buffers = (
            PlanBuffer("x", BufferRole.INPUT, 4 * M * N),
            PlanBuffer("y", BufferRole.SCRATCH, 4 * M * N),
        )
        step = PlanStep(0, (1, 1, 1), (KernelArgument("x"), KernelArgument("y"), KernelArgument(value=M * N)))
        plan = LaunchPlan(buffers, (step,), (ReturnedTensor("y", 0, "float32", (M, N)),))
        done.set_result(BuildResult(request, (Program(request.candidate, (kernel,), plan),)))
        return done


@pytest.fixture(scope="module")
def pack() -> Pack:
    result = load_pack("softmax")
    return result.with_(reference=DOUBLES, workloads=(Workload("small", {"M": M, "N": N}),))


@pytest.fixture(autouse=True)
def ends_by_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contests end by their rules, on a busy host too."""
    for name in ("_LEAST_WALL_S", "_MOST_WALL_S"):
        monkeypatch.setattr(pack_contest, name, 600.0)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("2 24000", "faster"),
        ("2 80000", "slower"),
        ("2 40000", "not faster"),
        ("3 20000", "wrong_values"),
    ],
)
def test_a_contest_ends_as_that_of_host_code_does(
    runner: RunnerClient, pack: Pack, tmp_path: Path, source: str, said: str
) -> None:
    contests = PackContests(pack, VerificationPlan(), RULES)
    pair = [Solution(n, Language.TRITON, text, "run") for n, text in (("mine", "2 40000"), ("other", source))]
    result = contests.compare(runner, WrittenDoubles(), tmp_path, pair[0], pair[1])
    if said == "wrong_values":
        assert (result["caught"], result["reasons"][0]["code"]) == (1, said)
        return
    outcome = result["duel"]["outcome"]
    # These rules drop equal ones after four blocks, one time in sixteen as slower.
    assert outcome == said or (said == "not faster" and outcome in ("undecided", "slower"))
    assert set(result["seconds"]) == {"0:small", "1:small"}
    assert result["protocols"] == {"small": "machine-code"}
    assert result["checked"]["launches"] > 0


@pytest.mark.slow
def test_a_long_contest_compares_few_outputs_from_first_to_last(
    runner: RunnerClient, pack: Pack, tmp_path: Path
) -> None:
    rules = StoppingRules(second=10_000, least=10_000, enough=10_000, most=200)
    contests = PackContests(pack, VerificationPlan(), rules)
    pair = [Solution(n, Language.TRITON, "2 20000", "run") for n in ("mine", "other")]
    result = contests.compare(runner, WrittenDoubles(), tmp_path, *pair)
    batches = len(result["seconds"]["0:small"]) // 8
    assert batches >= 50
    assert 2 * 4 <= result["checked"]["launches"] <= batches, "two launches of each batch that is compared"


def test_what_is_no_kernel_alone_meets_elsewhere(runner: RunnerClient, pack: Pack, tmp_path: Path) -> None:
    contests = PackContests(pack, VerificationPlan(), RULES)
    triton, host = (Solution(n, Language.TRITON, n, "run") for n in ("2 40000", "host"))
    with pytest.raises(ContestUnavailable, match="computes on data"):
        contests.compare(runner, WrittenDoubles(), tmp_path, triton, host)
    with pytest.raises(ContestUnavailable, match="no Triton solution"):
        contests(triton, Solution("plain", Language.TORCH, "", "run"))


def test_a_searchs_own_runner_is_renewed_for_a_contest(runner: RunnerClient, pack: Pack) -> None:
    contests = PackContests(pack, VerificationPlan(), RULES, (runner, WrittenDoubles()))
    before, slow, fast = runner.pid, "2 60000", "2 40000"
    result = contests(*(Solution(n, Language.TRITON, n, "run") for n in (slow, fast)))
    assert result["duel"]["outcome"] == "faster"
    assert runner.pid != before


class Sandbox:
    """Contests in a sandbox that end as they are told to; what they were asked."""

    def __init__(self, *outcomes: str) -> None:
        self.outcomes, self.asked = list(outcomes), list[tuple[str, float | None]]()

    def __call__(
        self, incumbent: Solution, candidate: Solution, trusted_gain: float | None
    ) -> Mapping[str, Any]:
        self.asked.append((candidate.name, trusted_gain))
        return ended(self.outcomes.pop(0), 0.5)


def ended(outcome: str, gain: float) -> Mapping[str, Any]:
    duel = {"outcome": outcome, "gain": gain, "differences": [gain]}
    return {"duel": duel, "seconds": {}, "protocols": {}, "checked": CheckedLaunches(3).to_json()}


MINE, OTHER = (Solution(n, Language.TRITON, n, "run") for n in ("mine", "other"))


def judging(first: Any, sandbox: Sandbox) -> Any:
    nothing: Any = None  # neither pack nor lane is asked
    result = bench.SolutionBench(nothing, nothing, first_contest=first)
    vars(result)["_in_sandbox"] = sandbox
    return result


def test_a_pair_that_cannot_meet_there_is_timed_in_the_sandbox_twice() -> None:
    def unavailable(incumbent: Solution, candidate: Solution) -> Mapping[str, Any]:
        raise ContestUnavailable("no driver")

    sandbox, verdict = Sandbox("faster", "slower"), SolutionVerdict("softmax", "other")
    result, _ = judging(unavailable, sandbox)._compare(MINE, OTHER, verdict)
    assert sandbox.asked == [("other", None), ("other", None)], "its own word backs no second contest"
    assert (result.outcome, result.checked.launches) == ("unconfirmed", 6)


def test_the_second_contest_is_told_what_a_clock_that_nobody_can_touch_has_said() -> None:
    sandbox, verdict = Sandbox("faster"), SolutionVerdict("softmax", "other")
    result, _ = judging(lambda *_: ended("faster", 0.04), sandbox)._compare(MINE, OTHER, verdict)
    assert sandbox.asked == [("other", 0.04)]
    assert (result.outcome, result.gain) == ("faster", 0.5)


@pytest.mark.parametrize(
    ("claimed", "trusted", "plausible"),
    [(0.03, 0.03, True), (0.03, None, False), (0.3, 0.03, False), (0.3, 0.4, True)],
)
def test_a_claim_needs_no_audit_only_where_a_trusted_clock_says_as_much(
    claimed: float, trusted: float | None, plausible: bool
) -> None:
    clock = SimulatedPairedClock(1e-3, 1 - 1 / (1 + claimed), noise=0.001)
    assert is_plausible(run_comparison(clock, RULES, 1), trusted) == plausible


@pytest.mark.slow
def test_a_packs_search_through_machine_code_confirms_by_a_runner_first(tmp_path: Path) -> None:
    target, _ = open_target("softmax", device="cpu")
    with contextlib.closing(opening._HostOpening(target, VerificationPlan(), tmp_path)()) as judge:
        assert isinstance(judge, PackJudge)
        assert judge.contests is not None
        assert isinstance(judge.contests(load_pack("softmax"), VerificationPlan(), RULES), PackContests)


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
