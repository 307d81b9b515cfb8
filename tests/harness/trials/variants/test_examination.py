"""What a verification on a device draws, compiles and launches, and in which order: judged here without a device."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import torch
import triton.language as tl

from forecast_autotune.records import Config
from forecast_harness.sandbox.api import CandidateFault, Cell, CellAnswer, Fault
from forecast_harness.sandbox.jobs import TensorArrays, TensorBytes
from forecast_harness.targets.kernels.base_kernel import KernelSurvey
from forecast_harness.trials.variants import jobs, verify
from forecast_harness.trials.variants.base_runner import BaseKernelRun, BaseKernelRunner
from forecast_harness.trials.variants.compilation import CELL_ENTRY, CompiledCalls, VariantCompiler
from forecast_harness.trials.variants.files import (
    BaseBinaries,
    binaries_as_arrays,
    launchers_among,
    read_cache,
    write_cache,
)
from forecast_harness.trials.variants.jobs import VariantExamination, VariantProblem
from forecast_harness.trials.variants.verify import VARIANT_PLAN
from forecast_harness.verify.blocks import Slot
from forecast_harness.verify.cost_control import ComputeDevice, PhaseTimer
from forecast_harness.verify.examiner import SolutionExaminer
from forecast_harness.verify.problem import DrawSpec
from forecast_harness.verify.verdict import Reason, ReasonCode
from tests.harness.base_doubler import BaseDoubler
from tests.harness.variant_kernels import DOUBLE, subject, vector_call

CONFIGS = tuple(Config.of({"BLOCK": block}) for block in (32, 64, 128, 256))
PLAN = replace(VARIANT_PLAN, device="cuda")
SUBJECT = replace(subject(DOUBLE, vector_call(), vector_call(100)), configs=CONFIGS)
SURVEYED = KernelSurvey(
    ("out",), (), CONFIGS[2], True, words={"x.0": "any"}, evidence=3, most=1 << 22, signature="{}"
)
BINARIES = {"key/k.cubin": TensorBytes("uint8", (2,), b"ab")}
NOTHING: dict[str, Any] = {"patched": [], "flags": {}, "threads": []}


class DoublingCell:
    """Stands in for a variant's cell, which multiplies by `factor`; notes what it is asked."""

    def __init__(self, base: BaseDoubler, factor: int = 2, broken: bool = False) -> None:
        self.asked: list[str] = []
        self.given: dict[str, TensorBytes] = {}
        """Files for its cache."""
        self.compiled: list[str] = []
        self.launched: list[str] = []
        self.late = 0
        """Launches that nothing was compiled for."""
        self._base, self._factor, self._broken = base, factor, broken
        self._block = b""

    def ask(
        self, entry: str, payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes] | None = None
    ) -> CellAnswer:
        self.asked.append(entry.rpartition(":")[2])
        if entry == CELL_ENTRY:
            self.given |= arrays or {}
            assert self._base.began.wait(60), "meanwhile the base works on what was drawn"
            self.compiled += [form(call["call"]) for call in payload["calls"]]
            return CellAnswer({})
        if self.asked[-1] == "prepare":
            if self._broken:
                raise CandidateFault(Fault.EXCEPTION, "ImportError: no", "ImportError")
            return CellAnswer({"harness": NOTHING})
        if self.asked[-1] == "launch":
            self._launch(payload, torch.frombuffer(bytearray(arrays["block"].data), dtype=torch.uint8))
        value: dict[str, Any] = {"outputs": [], "harness": NOTHING}
        if self.asked[-1] == "launch":
            value |= {"seconds": 1e-5, "whole": 1e-5, "protocol": "events", "operations": {}}
            value |= {"kernels": 1, "compiled": 0}
        return CellAnswer(value, {"block": TensorBytes("uint8", (len(self._block),), self._block)})

    def _launch(self, payload: Mapping[str, Any], block: torch.Tensor) -> None:
        call = form(payload["call"])
        self.launched.append(call)
        self.late += call not in self.compiled
        if payload["watch"] != "off":
            views = {s.name: s.view(block) for s in map(Slot.from_json, payload["slots"])}
            views["out"].copy_(self._factor * views["x"])
        self._block = block.numpy().tobytes()


class Compiler:
    """Stands in for what compiles in another cell, and gives the `files`."""

    def __init__(self, files: TensorArrays) -> None:
        self.files = files
        self.forms: list[str] = []

    def compiled(self, calls: Sequence[Mapping[str, Any]]) -> CompiledCalls:
        self.forms += [form(call["call"]) for call in calls]
        return CompiledCalls(self.files, [])


def form(call: Mapping[str, Any]) -> str:
    n = call["kwargs"]["n"]["v"]
    return f"{call['kwargs']['_meta']['v']} {n == 1} {n % 16 == 0}"


def problem_of(base: BaseDoubler, known: KernelSurvey) -> VariantProblem:
    takes, runner = ("x", "out", "n", "BLOCK"), cast("BaseKernelRunner", base)
    return VariantProblem(SUBJECT, known, runner, CONFIGS, "cuda", known.deterministic, takes)


def examined(
    cell: DoublingCell, base: BaseDoubler, compiler: Compiler | None = None
) -> tuple[list[Reason], VariantExamination]:
    known = replace(SURVEYED, config=CONFIGS[0], most=1 << 14)
    problem = problem_of(base, known)
    judge = SolutionExaminer(jobs._variant_pack(SUBJECT, True), problem, cell, PLAN, b"a seed")
    beside = cast("VariantCompiler", compiler or Compiler(BINARIES))
    result = VariantExamination(judge, problem, cast("Cell", cell), beside, "cuda", PhaseTimer())
    return result.run(), result


def test_all_that_is_launched_was_compiled_while_the_base_was_asked() -> None:
    base = BaseDoubler()
    cell, compiler = DoublingCell(base), Compiler(BINARIES)
    reasons, result = examined(cell, base, compiler)
    assert reasons == []
    assert result.unable == []
    assert cell.asked[:3] == ["prepare", "compile_calls", "launch"]
    assert cell.given == BINARIES, "what another cell compiled while this one opened its device"
    assert set(compiler.forms) == set(cell.compiled)
    assert {f.partition("}")[0] for f in cell.launched} == {f"{{'BLOCK': {c.kwargs[0][1]}" for c in CONFIGS}
    assert cell.late == 0
    assert len(base.ran) >= 2 * (len(CONFIGS) + VARIANT_PLAN.cases), "every case is another one"


class RacingDoubler(BaseDoubler):
    """Gives three times `x` once it was launched on the same values twice, under the config that others are held to."""

    def __init__(self) -> None:
        super().__init__()
        self._values: list[torch.Tensor] = []

    def run(self, arguments: Any, scalars: Any, memory: Any, grid: Any, config: Config) -> BaseKernelRun:
        ran = super().run(arguments, scalars, memory, grid, config)
        self._values += [memory["x"]] * (config == CONFIGS[0])
        agrees = config != CONFIGS[0] or sum(one is memory["x"] for one in self._values) <= 2
        return ran if agrees else replace(ran, memory={**ran.memory, "out": 3 * memory["x"]})


@pytest.mark.parametrize("base", [BaseDoubler(), RacingDoubler()])
def test_a_wrong_result_is_found_at_the_first_launch_where_the_base_agrees_with_itself(
    base: BaseDoubler,
) -> None:
    cell = DoublingCell(base, factor=3)
    reasons, _ = examined(cell, base)
    if isinstance(base, RacingDoubler):
        assert reasons == [], "the result of a race is nothing to go by"
        return
    assert [r.code for r in reasons] == [ReasonCode.WRONG_VALUES]
    assert len(cell.launched) == 1


def test_a_call_at_recorded_sizes_may_be_answered_whatever_it_takes() -> None:
    elements = 1 << 28
    assert verify._limits_for(subject(DOUBLE, vector_call(elements))).answer_bytes >= 16 * elements


def test_a_variants_outputs_are_compared_where_its_base_was_launched() -> None:
    """A large case is checked on a device; this one launches the base, and moves results there by itself."""
    case = problem_of(BaseDoubler(), replace(SURVEYED, config=CONFIGS[0], most=1 << 14)).case(
        None, DrawSpec("normal", "contiguous", torch.Generator().manual_seed(0))
    )
    where = ComputeDevice("meta")
    assert case.check([2 * case.tensors["x"]], where)[0] is None
    assert not where.failure


def test_what_cannot_be_imported_is_not_launched() -> None:
    base = BaseDoubler()
    cell = DoublingCell(base, broken=True)
    with pytest.raises(CandidateFault, match="ImportError"):
        examined(cell, base)
    assert cell.asked == ["prepare"]


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
