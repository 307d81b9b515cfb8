"""What travels with a verification: the base's binaries, and what a variant was compiled to early."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import triton.language as tl

from forecast_autotune.records import Config
from forecast_harness.sandbox.api import (
    Cell,
    CellAnswer,
    JobContext,
    SandboxLane,
)
from forecast_harness.sandbox.jobs import TensorBytes
from forecast_harness.targets.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.trials.variants import jobs
from forecast_harness.trials.variants.base_runner import BaseKernelRunner
from forecast_harness.trials.variants.compilation import CompiledCalls, VariantCompiler
from forecast_harness.trials.variants.files import (
    BaseBinaries,
    EarlyCompilation,
    binaries_as_arrays,
    launchers_among,
    read_cache,
    write_cache,
)
from forecast_harness.trials.variants.jobs import VariantExamination
from forecast_harness.trials.variants.kernel_survey import expected_survey
from forecast_harness.trials.variants.problem import VariantProblem
from forecast_harness.trials.variants.verify import VARIANT_PLAN, compile_early, survey
from forecast_harness.verify.cost_control import PhaseTimer
from forecast_harness.verify.examiner import SolutionExaminer
from forecast_harness.verify.plan import VerificationPlan
from tests.harness.base_doubler import BaseDoubler
from tests.harness.variant_kernels import (
    DOUBLE,
    SOFTMAX,
    softmax_call,
    subject,
    variant,
    vector_call,
)

triton = pytest.importorskip("triton")


@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


def compiled(monkeypatch: pytest.MonkeyPatch, cache: Path) -> object:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    forms = {"x": "*fp32", "y": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    return triton.compile(ASTSource(double, forms, {"BLOCK": 64}), target=GPUTarget("cuda", 90, 32))


def test_what_one_cell_compiled_another_one_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    built = compiled(monkeypatch, first)
    known = BaseBinaries()
    known.take(read_cache({}, {}, {}).arrays)
    assert {Path(name).suffix for name in known.files} == {".json", ".cubin"}, "what a launch needs"
    shutil.rmtree(first)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(second))
    answer = json.loads(json.dumps(known.to_payload()))
    write_cache({}, binaries_as_arrays(answer), {})
    before = {p: p.stat().st_mtime_ns for p in second.rglob("*")}
    result = compiled(monkeypatch, second)
    assert result.asm["cubin"] == built.asm["cubin"]  # type: ignore[attr-defined]
    assert {p: p.stat().st_mtime_ns for p in second.rglob("*")} == before, "nothing was compiled"


def test_launchers_are_kept_and_are_all_that_a_variant_may_see(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled(monkeypatch, tmp_path)
    for folder, name in (("ab", "__triton_launcher.so"), ("cd", "cuda_utils.so")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(b"module")
    known = BaseBinaries()
    known.take(read_cache({}, {}, {}).arrays)
    kept = binaries_as_arrays(known.to_payload())
    assert {Path(name).suffix for name in kept} == {".json", ".cubin", ".so"}
    assert {name: bytes(a.data) for name, a in launchers_among(kept).items()} == {
        "ab/__triton_launcher.so": b"module"
    }


BLOCKS = tuple(Config.of({"BLOCK": block}) for block in (32, 64, 128, 256))
PLAN = replace(VARIANT_PLAN, device="cuda")
SUBJECT = replace(subject(DOUBLE, vector_call(), vector_call(100)), configs=BLOCKS)
FOUND = KernelSurvey(
    ("out",), (), BLOCKS[2], True, words={"x.0": "any"}, evidence=3, most=1 << 22, signature="{}"
)
MORE = TensorBytes("uint8", (1,), b"1")


@pytest.fixture(scope="module")
def early(compiling: SandboxLane) -> EarlyCompilation:
    """Of a device that is not there: the base cannot be opened on it, which is the verification's affair."""
    result = compile_early(variant(DOUBLE), SUBJECT, compiling, architecture=90, plan=PLAN)
    assert result is not None
    return result


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
    problem = VariantProblem(SUBJECT, found, reference, BLOCKS, "cuda", found.deterministic, takes)
    pack = jobs._variant_pack(SUBJECT, found.deterministic)
    judge = SolutionExaminer(pack, problem, cast("Cell", cell), PLAN, jobs._seed(early.seed), alone=False)
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


def test_nothing_comes_of_a_variant_that_cannot_be_compiled(compiling: SandboxLane) -> None:
    broken = variant(DOUBLE.replace("2 *", "nothing *"))
    result = compile_early(broken, SUBJECT, compiling, architecture=90, plan=PLAN)
    assert result is not None
    assert not result.files
    assert not result.is_for([])


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
    result = survey(base, judging, plan=VerificationPlan(cases=4, timed=0))
    expected = expected_survey(base, "cpu")
    assert any(isinstance(word, str) for word in result.words.values())
    assert (expected.words, expected.evidence, expected.untied) == (
        result.words,
        result.evidence,
        result.untied,
    )
    assert expected.most >= result.most > 0, "less where launches took long"
