"""Surveys of bases that do little or go astray: idle calls, reads beyond a tensor, dead devices."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

pytest.importorskip("torch")

import torch

from forecast_autotune.errors import RecordError, VariantError
from forecast_autotune.records import Argument, Config
from forecast_harness.sandbox.api import CandidateFault, Cell, Fault, JobContext, ResourceLimits, SandboxLane
from forecast_harness.targets.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.trials.variants.base_runner import (
    BaseKernelError,
    BaseKernelRun,
    BaseKernelRunner,
    TensorMemory,
)
from forecast_harness.trials.variants.kernel_survey import KernelSurveyor
from forecast_harness.trials.variants.verify import survey, verify_variant
from forecast_harness.verify.blocks import build_arena
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.verdict import ReasonCode
from tests.harness.variant_kernels import DOUBLE, HEAD, number, subject, tensor, variant, vector_call

QUICK = VerificationPlan(cases=4, timed=0)
PARTS = HEAD + (
    "def kernel(start, x, out, BLOCK: tl.constexpr):\n"
    "    row = tl.program_id(0)\n"
    "    low = tl.load(start + row)\n"
    "    high = tl.load(start + row + 1)\n"
    "    if low >= high:\n"
    "        return\n"
    "    i = low + tl.arange(0, BLOCK)\n"
    "    tl.store(out + i, 2 * tl.load(x + i, mask=i < high), mask=i < high)\n"
)
WINDOW = HEAD + (
    "def kernel(x, out, BLOCK: tl.constexpr):\n"
    "    value = tl.load(x + tl.arange(0, 2048)).to(tl.float32)\n"
    "    tl.store(out + tl.arange(0, 16), tl.zeros([16], tl.float32) + tl.sum(value, axis=0))\n"
)
KEPT = HEAD + (
    "def kernel(x, keep, out, BLOCK: tl.constexpr):\n"
    "    i = tl.arange(0, 64)\n"
    "    kept = tl.load(keep + i).to(tl.int1)\n"
    "    tl.store(out + i, tl.where(kept, tl.load(x + i), 0.0))\n"
)


def parts(count: int) -> BaseKernel:
    """Many of its calls, of random pointers, leave nothing to do: the fewer parts, the more."""
    call = [tensor("start", count + 1, dtype="int32"), tensor("x", 300), tensor("out", 300)]
    # Without a formula for its grid, its sizes stay.
    return subject(PARTS, call, grid=lambda call, meta: (count,))


class Idler:
    """Stands in for the base's cell. It doubles `x`, but of its different calls does the first ones not."""

    def __init__(self, idle: int) -> None:
        self.idle = idle
        self.calls: dict[bytes, int] = {}
        self.runs: list[tuple[bytes, bool]] = []
        """Of every launch what `x` was, and whether `out` held nothing but NaN."""

    def run(
        self,
        arguments: Sequence[Argument],
        scalars: Mapping[str, Any],
        memory: TensorMemory,
        grid: Sequence[int],
        config: Config,
    ) -> BaseKernelRun:
        data = memory["x"].numpy().tobytes()
        self.runs.append((data, bool(memory["out"].isnan().all())))
        number = self.calls.setdefault(data, len(self.calls))
        if number < self.idle:
            return BaseKernelRun(memory, (), 0, 0.0)
        return BaseKernelRun({**memory, "out": 2 * memory["x"]}, ("out",), 0, 0.0)


def explorer(idle: int, **options: Any) -> KernelSurveyor:
    request = subject(DOUBLE, vector_call(), **options)
    generator = torch.Generator().manual_seed(1)
    return KernelSurveyor(request, cast("BaseKernelRunner", Idler(idle)), "cpu", generator)


@pytest.mark.parametrize("idle", [0, 13])
def test_what_is_written_is_found_where_most_calls_have_nothing_to_do(idle: int) -> None:
    result = explorer(idle).survey()
    assert result.writes == ("out",)
    assert result.words == {"x.0": "any"}


def test_a_call_is_launched_once_as_it_is_and_twice_between_other_surroundings() -> None:
    """The launch that shows what is written is one of those two."""
    request = explorer(0)
    request.survey()
    runs = cast("Idler", request.reference).runs
    chosen, *accepted = [
        [unset for x, unset in runs if x == each] for each in dict.fromkeys(x for x, _ in runs)
    ]
    assert chosen == [False, True]  # which config works
    assert accepted
    assert all(one == [False, True, True] for one in accepted)


def test_a_base_that_writes_nothing_shows_nothing() -> None:
    with pytest.raises(RecordError, match="writes to no tensor"):
        explorer(10**6).survey()


def test_the_twin_of_a_base_that_is_often_idle_is_accepted(judging: SandboxLane) -> None:
    request = parts(2)
    known = survey(request, judging, plan=QUICK)
    assert known.writes == ("out",)
    result = verify_variant(variant(f"# Twin.\n{PARTS}"), request, known, judging, device="cpu", plan=QUICK)
    assert result.verdict.accepted, result.verdict.reasons


def test_a_variant_that_does_nothing_is_found_out(judging: SandboxLane) -> None:
    request = parts(16)
    known = survey(request, judging, plan=QUICK)
    lazy = variant(PARTS.replace("low >= high", "low >= 0"))
    result = verify_variant(lazy, request, known, judging, device="cpu", plan=QUICK)
    assert {r.code for r in result.verdict.reasons} == {ReasonCode.WRONG_VALUES}


def test_sizes_are_kept_where_smaller_ones_would_be_read_beyond(judging: SandboxLane) -> None:
    """A sum over many numbers of 16 bits is no number if any of them is none, as one in 32 of all is."""
    call = [tensor("x", 2048, dtype="float16"), tensor("out", 16)]
    result = survey(subject(WINDOW, call, grid=lambda call, meta: (1,)), judging, plan=QUICK)
    assert result.words["x.0"] == 2048


@pytest.mark.parametrize(
    "kind", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]
)
def test_noise_around_tensors_is_finite(kind: str) -> None:
    arena = build_arena({"x": torch.zeros(16)}, {}, {}, random.Random(1), behind=1 << 14, noise=True)
    read = arena.block.view(getattr(torch, kind)).double()
    assert bool(read.isfinite().all())
    assert float(read.abs().max()) < 4
    assert len(read.unique()) > 8


def test_a_base_that_reads_a_mask_beyond_its_end_is_not_accepted(judging: SandboxLane) -> None:
    call = [tensor("x", 64), tensor("keep", 16, dtype="bool"), tensor("out", 64)]
    with pytest.raises(VariantError, match="depends on what lies around"):
        survey(subject(KEPT, call, grid=lambda call, meta: (1,)), judging, plan=QUICK)


@pytest.mark.parametrize("word", ["any", 2048, -100])
def test_a_survey_is_read_back_whatever_a_size_keeps(word: str | int) -> None:
    known = KernelSurvey(("out",), (), Config.of({}), True, {"x.0": word})
    assert KernelSurvey.from_json(known.to_json()) == known


def test_words_that_are_none_are_refused() -> None:
    data = KernelSurvey(("out",), (), Config.of({}), True).to_json() | {"words": {"x.0": 1.5}}
    with pytest.raises(RecordError, match=r"words\.x\.0 must be an integer .* or a text"):
        KernelSurvey.from_json(data)


class Dying:
    """Stands in for a job's work: cells whose launches all raise."""

    def __init__(self, detail: str) -> None:
        self.limits = ResourceLimits()
        self.detail = detail
        self.opened = 0

    def cell(self, limits: ResourceLimits) -> Cell:
        self.opened += 1
        return cast("Cell", self)

    def ask(self, entry: str, payload: Mapping[str, Any], arrays: Any = None) -> None:
        if entry.endswith(":launch"):
            raise CandidateFault(Fault.EXCEPTION, self.detail)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("detail", "cells"),
    [
        ("AcceleratorError: CUDA error: an illegal memory access was encountered", 3),
        ("RuntimeError: Triton Error [CUDA]: misaligned address", 3),
        ("OutOfResources: out of resource: shared memory", 1),
    ],
)
def test_a_process_whose_device_has_failed_is_not_asked_again(detail: str, cells: int) -> None:
    work = Dying(detail)
    reference = BaseKernelRunner(cast("JobContext", work), "cpu", random.Random(1))
    call = [tensor("x", 16), number("n", 16)]
    for _ in range(3):
        with pytest.raises(BaseKernelError):
            reference.run(call, {"n": 16}, {"x": torch.zeros(16)}, (1,), Config.of({}))
    assert work.opened == cells
