"""Contests of a pack's solutions through machine code: compiled by Triton, launched by a fake driver."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from benchmarks.lib.machine_code import fake_code as code
from benchmarks.lib.machine_code.fake_code import image
from forecast_harness import bench
from forecast_harness.bench import ContestUnavailable
from forecast_harness.machine_code.compile_workers import BuildRequest, BuildResult
from forecast_harness.machine_code.pack_contest import PackContests
from forecast_harness.machine_code.records import (
    BufferRole,
    CompiledKernel,
    KernelArgument,
    LaunchPlan,
    PlanBuffer,
    PlanStep,
    Program,
    ReturnedTensor,
)
from forecast_harness.machine_code.runner.client import RunnerClient
from forecast_harness.packs.load import load_pack
from forecast_harness.packs.schema import Language, Pack, Solution, Workload
from forecast_harness.timing.paired_comparison import StoppingRules
from forecast_harness.verify.checked_launches import CheckedLaunches
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.verdict import SolutionVerdict

M, N = 4, 32
RULES = StoppingRules(first=2, second=4, least=6, enough=10, most=12)
DOUBLES = "def reference(x):\n    return 2 * x\n"


class WrittenDoubles:
    """Compiles sources such as `2 40000`: the factor that x is multiplied with, and ns."""

    count = 1

    def submit(self, request: BuildRequest) -> Future[BuildResult]:
        done: Future[BuildResult] = Future()
        if request.source == "host":
            done.set_result(BuildResult(request, host_code="torch.mm computes on data"))
            return done
        factor, cost = map(int, request.source.split())
        kinds = ("*fp32", "*fp32", "i32")
        made = image("kernel", kinds, [code.scale(1, 0, 1000 * factor, 2), code.spend(cost)])
        kernel = CompiledKernel("kernel", 90, kinds, image=made)
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
    made = load_pack("softmax")
    return made.with_(reference=DOUBLES, workloads=(Workload("small", {"M": M, "N": N}),))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("2 24000", "faster"),
        ("2 80000", "slower"),
        ("2 40000", "undecided"),
        ("3 20000", "wrong_values"),
    ],
)
def test_a_contest_ends_as_that_of_host_code_does(
    runner: RunnerClient, pack: Pack, tmp_path: Path, source: str, said: str
) -> None:
    contests = PackContests(pack, VerificationPlan(), RULES)
    pair = [Solution(n, Language.TRITON, text, "run") for n, text in (("mine", "2 40000"), ("other", source))]
    found = contests.compare(runner, WrittenDoubles(), tmp_path, pair[0], pair[1])
    if said == "wrong_values":
        assert (found["caught"], found["reasons"][0]["code"]) == (1, said)
        return
    assert found["duel"]["outcome"] == said
    assert set(found["seconds"]) == {"0:small", "1:small"}
    assert found["protocols"] == {"small": "machine-code"}
    assert found["checked"]["launches"] > 0


def test_what_is_no_kernel_alone_meets_elsewhere(runner: RunnerClient, pack: Pack, tmp_path: Path) -> None:
    contests = PackContests(pack, VerificationPlan(), RULES)
    triton, host = (Solution(n, Language.TRITON, n, "run") for n in ("2 40000", "host"))
    with pytest.raises(ContestUnavailable, match="computes on data"):
        contests.compare(runner, WrittenDoubles(), tmp_path, triton, host)
    with pytest.raises(ContestUnavailable, match="no Triton solution"):
        contests(triton, Solution("plain", Language.TORCH, "", "run"))


def test_a_pair_that_cannot_meet_there_is_timed_in_the_sandbox_twice() -> None:
    asked: list[str] = []
    mine, other = (Solution(n, Language.TRITON, n, "run") for n in ("mine", "other"))

    def unavailable(incumbent: Solution, candidate: Solution) -> Mapping[str, Any]:
        raise ContestUnavailable("no driver")

    def in_sandbox(incumbent: Solution, candidate: Solution) -> Mapping[str, Any]:
        asked.append(candidate.name)
        duel = {"outcome": "faster" if len(asked) == 1 else "slower", "gain": -0.1, "differences": [-0.1]}
        return {"duel": duel, "seconds": {}, "protocols": {}, "checked": CheckedLaunches(3).to_json()}

    verdict = SolutionVerdict("softmax", "other")
    contests = (unavailable, in_sandbox)
    found, _ = bench._compare_candidate(mine, other, verdict, VerificationPlan(), contests)
    assert asked == ["other", "other"]
    assert (found.outcome, found.checked.launches) == ("unconfirmed", 6)
