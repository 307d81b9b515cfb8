"""A variant that is compiled before its base is surveyed: what a verification then takes of it, and what not."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from forecast_autotune.records import Config
from forecast_harness.sandbox.api import Cell, CellAnswer, JobContext, SandboxLane
from forecast_harness.sandbox.jobs import TensorBytes
from forecast_harness.targets.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.trials.variants import jobs
from forecast_harness.trials.variants.base_runner import BaseKernelRunner
from forecast_harness.trials.variants.compilation.compile_beside import CompiledCalls, VariantCompiler
from forecast_harness.trials.variants.compilation.early_compilation import EarlyCompilation
from forecast_harness.trials.variants.examination import VariantExamination
from forecast_harness.trials.variants.expected_survey import expected_survey
from forecast_harness.trials.variants.problem import VariantProblem
from forecast_harness.trials.variants.verify import VARIANT_PLAN, compile_early, survey
from forecast_harness.verify.cost_control import PhaseTimer
from forecast_harness.verify.judge import SolutionJudge
from forecast_harness.verify.plan import VerificationPlan
from tests.harness.base_doubler import BaseDoubler
from tests.harness.variant_kernels import DOUBLE, SOFTMAX, softmax_call, subject, variant, vector_call

CONFIGS = tuple(Config.of({"BLOCK": block}) for block in (32, 64, 128, 256))
PLAN = replace(VARIANT_PLAN, device="cuda")
SUBJECT = replace(subject(DOUBLE, vector_call(), vector_call(100)), configs=CONFIGS)
FOUND = KernelSurvey(
    ("out",), (), CONFIGS[2], True, words={"x.0": "any"}, evidence=3, most=1 << 22, signature="{}"
)
MORE = TensorBytes("uint8", (1,), b"1")


@pytest.fixture(scope="module")
def early(compiling: SandboxLane) -> EarlyCompilation:
    """Of a device that is not there: the base cannot be opened on it, which is the verification's affair."""
    found = compile_early(variant(DOUBLE), SUBJECT, compiling, architecture=90, plan=PLAN)
    assert found is not None
    return found


class CompilingCell:
    """Notes which files it is given, and compiles to one more."""

    def __init__(self) -> None:
        self.given: list[str] = []
        self.asked: list[str] = []

    def ask(self, entry: str, payload: Any, arrays: Mapping[str, TensorBytes] | None = None) -> CellAnswer:
        self.asked.append(entry.rpartition(":")[2])
        self.given += arrays or {}
        return CellAnswer({"late": []}, {"key/more.cubin": MORE})


def compiled_as_verified(
    early: EarlyCompilation, found: KernelSurvey, cell: CompilingCell
) -> tuple[list[dict[str, Any]], CompiledCalls]:
    """What a verification with the seed of `early` and this survey draws, and has from the compiler."""
    takes = ("x", "out", "n", "BLOCK")
    reference = cast("BaseKernelRunner", BaseDoubler())
    problem = VariantProblem(SUBJECT, found, reference, CONFIGS, "cuda", found.deterministic, takes)
    pack = jobs._variant_pack(SUBJECT, found.deterministic)
    judge = SolutionJudge(pack, problem, cast("Cell", cell), PLAN, jobs._seed(early.seed), alone=False)
    work = cast("JobContext", SimpleNamespace(cell=lambda: nullcontext(cell)))
    compiler = VariantCompiler(work, {}, early=early, architecture=90)
    return VariantExamination(
        judge, problem, cast("Cell", cell), compiler, "cuda", PhaseTimer()
    ).compile_early()


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_verification_takes_what_was_compiled_for_the_calls_that_it_draws(
    early: EarlyCompilation, deterministic: bool
) -> None:
    cell = CompilingCell()
    calls, compiled = compiled_as_verified(early, replace(FOUND, deterministic=deterministic), cell)
    assert early.is_for(calls)
    assert {name.rpartition(".")[2] for name in compiled.files} == {"json", "cubin"}
    assert compiled.files == early.arrays()
    assert "compile_beside" not in cell.asked


def test_where_the_survey_found_other_sizes_the_rest_is_compiled_beside_what_is_there(
    early: EarlyCompilation,
) -> None:
    cell = CompilingCell()
    calls, compiled = compiled_as_verified(early, replace(FOUND, words={"x.0": "16"}), cell)
    assert not early.is_for(calls)
    assert cell.asked == ["write_cache", "compile_beside"]
    assert cell.given == list(early.files)
    assert compiled.files == {"key/more.cubin": MORE}


def test_of_another_seed_the_calls_are_others(early: EarlyCompilation) -> None:
    cell = CompilingCell()
    calls, _ = compiled_as_verified(replace(early, seed="another"), FOUND, cell)
    assert not early.is_for(calls)


def test_nothing_comes_of_a_variant_that_cannot_be_compiled(compiling: SandboxLane) -> None:
    broken = variant(DOUBLE.replace("2 *", "nothing *"))
    found = compile_early(broken, SUBJECT, compiling, architecture=90, plan=PLAN)
    assert found is not None
    assert not found.files
    assert not found.is_for([])


def test_where_nothing_can_be_drawn_nothing_is_compiled(compiling: SandboxLane) -> None:
    """Without a formula for its grid its sizes stay, and these are too large."""
    large = subject(DOUBLE, vector_call(1 << 26), grid=lambda call, meta: (1 << 20,))
    assert compile_early(variant(DOUBLE), large, compiling, architecture=90, plan=PLAN) is None


@pytest.mark.parametrize(
    "base",
    [
        subject(DOUBLE, vector_call(), vector_call(100), vector_call(200)),
        subject(
            SOFTMAX,
            softmax_call(),
            softmax_call(8, 96),
            softmax_call(24, 40),
            grid=lambda c, m: (c[0].shape[0],),
        ),
    ],
)
def test_a_survey_finds_what_is_expected(judging: SandboxLane, base: BaseKernel) -> None:
    found = survey(base, judging, plan=VerificationPlan(cases=4, timed=0))
    expected = expected_survey(base, "cpu")
    assert any(isinstance(word, str) for word in found.words.values())
    assert (expected.words, expected.evidence, expected.untied) == (
        found.words,
        found.evidence,
        found.untied,
    )
    assert expected.most >= found.most > 0, "less where launches took long"
