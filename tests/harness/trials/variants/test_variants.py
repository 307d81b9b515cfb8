"""Verification of variants in real cells: what is accepted, what is found out, where nothing can be said."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("torch")

import torch

from forecast_autotune import frameworks
from forecast_autotune.errors import RecordError, VariantError
from forecast_autotune.records import Argument, Config, Device, Kernel, Problem
from forecast_autotune.variants import Variant, admitted, covers
from forecast_autotune.variants.signature import INTERPRETER
from forecast_harness.sandbox.api import CandidateFault, Cell, Fault, JobContext, ResourceLimits, SandboxLane
from forecast_harness.targets.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.targets.kernels.user_kernel import find_kernel, import_file
from forecast_harness.trials.variants.base_runner import (
    BaseKernelError,
    BaseKernelRun,
    BaseKernelRunner,
    TensorMemory,
)
from forecast_harness.trials.variants.call_sampling import RecordedCalls
from forecast_harness.trials.variants.kernel_survey import KernelSurveyor
from forecast_harness.trials.variants.verify import (
    VARIANT_LIMITS,
    VariantVerification,
    survey,
    verify_variant,
)
from forecast_harness.verify.blocks import build_arena
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.verdict import Judgement, ReasonCode
from tests.harness.variant_kernels import (
    CONFIGS,
    DOUBLE,
    GATHER,
    HEAD,
    NORM,
    SCATTER,
    SEGMENTS,
    SOFTMAX,
    SPANS,
    SUM_INTO,
    UNMASKED,
    number,
    rows,
    softmax_call,
    subject,
    tensor,
    variant,
    vector_call,
)

QUICK = VerificationPlan(cases=4, timed=0)
CPU = Device("cpu-x86_64", "cpu")
SURVEYS: dict[str, KernelSurvey] = {}
"""By the subject's name: bases are the same in all tests."""
VECTORS = subject(DOUBLE, vector_call())
MATRICES = subject(SOFTMAX, softmax_call(), grid=rows)


def known(lane: SandboxLane, asked: BaseKernel) -> KernelSurvey:
    key = json.dumps(asked.to_json())
    if key not in SURVEYS:
        SURVEYS[key] = survey(asked, lane, plan=QUICK)
    return SURVEYS[key]


def judged(lane: SandboxLane, asked: BaseKernel, other: Variant | str, **options: Any) -> VariantVerification:
    result = variant(other) if isinstance(other, str) else other
    return verify_variant(result, asked, known(lane, asked), lane, device=INTERPRETER, plan=QUICK, **options)


def problem(arguments: Sequence[Argument]) -> Problem:
    kernel = Kernel("kernel", source_sha256="5" * 64)
    return Problem("", kernel, tuple(arguments), CPU)


def codes(result: VariantVerification) -> set[ReasonCode]:
    return {r.code for r in result.verdict.reasons}


# --- surveys ---


def test_a_kernel_without_masks_is_drawn_sizes_that_it_accepts(judging: SandboxLane) -> None:
    request = subject(UNMASKED, vector_call())
    result = known(judging, request)
    assert (result.words, result.grid, result.deterministic) == ({"x.0": "128"}, "(cdiv(x.0, BLOCK))", True)
    assert covers(result.signature, problem(vector_call(1280)))
    assert not covers(result.signature, problem(vector_call(1279)))
    # A variant that masks is as right.
    assert judged(judging, request, DOUBLE).verdict.accepted


def test_a_tensor_that_is_added_into_keeps_what_it_held(judging: SandboxLane) -> None:
    call = [tensor("x", 4096), tensor("acc", 1), number("n", 4096)]
    request = subject(SUM_INTO, call)
    assert known(judging, request).updates == ("acc",)
    stored = SUM_INTO.replace("tl.atomic_add(acc, ", "tl.store(acc, ").replace("BLOCK: tl", "BLOCK: tl")
    assert ReasonCode.WRONG_VALUES in codes(judged(judging, request, stored))
    zeroing = SUM_INTO.replace("@triton.jit", 'RESET_TO_ZERO = ["acc"]\n\n\n@triton.jit')
    assert ReasonCode.WRONG_VALUES in codes(judged(judging, request, zeroing)), "it forgets what was there"
    always_zero = dataclasses.replace(request, zeroed=("acc",))
    assert judged(judging, always_zero, zeroing).verdict.accepted, "unless that is zero by agreement"


def test_sizes_without_a_known_grid_stay_as_recorded(judging: SandboxLane) -> None:
    request = subject(DOUBLE, vector_call(300), grid=lambda call, meta: (7 if meta["BLOCK"] == 64 else 3,))
    result = known(judging, request)
    assert covers(result.signature, problem(vector_call(300)))
    assert not covers(result.signature, problem(vector_call(301)))
    assert judged(judging, request, DOUBLE.replace("2 *", "1 *")).verdict.judgement is Judgement.REJECTED


def test_drawn_indices_give_no_place_to_two_programs(judging: SandboxLane) -> None:
    """Which of them comes last is chance on a device: a source that is right would be refused by it."""
    call = [tensor("x", 600), tensor("slots", 600, dtype="int64"), tensor("out", 600), number("n", 600)]
    request = subject(SCATTER, call)
    assert known(judging, request).rows_of == "out"
    backwards = "tl.num_programs(0) - 1 - tl.program_id(0)"
    assert judged(judging, request, SCATTER.replace("tl.program_id(0)", f"({backwards})")).verdict.accepted
    wrong = SCATTER.replace("out + at", "out + tl.where(at == 1, 0, at)")
    assert judged(judging, request, wrong).verdict.judgement is Judgement.REJECTED


def test_bounds_of_segments_share_out_the_rows_that_are_written(judging: SandboxLane) -> None:
    call = [tensor("x", 600), tensor("scale", 6), tensor("bounds", 7, dtype="int32"), tensor("out", 600)]
    request = subject(SEGMENTS, call, grid=lambda call, meta: (6,))
    assert known(judging, request).rows_of == "out"
    assert judged(judging, request, SEGMENTS.replace("i < end", "i <= end - 1")).verdict.accepted
    wrong = SEGMENTS.replace("(first, end, BLOCK)", "(first, end - end % 2, BLOCK)")
    assert judged(judging, request, wrong).verdict.judgement is Judgement.REJECTED


def test_segments_that_overlap_however_they_are_drawn_are_no_calls(judging: SandboxLane) -> None:
    spans = [tensor(name, 6, dtype="int32") for name in ("starts", "counts")]
    call = [tensor("x", 600), tensor("scale", 6), *spans, tensor("out", 600)]
    with pytest.raises(VariantError, match="programs write different results to one place of out"):
        survey(subject(SPANS, call, grid=lambda call, meta: (6,)), judging, plan=QUICK)


def test_an_index_that_is_added_at_may_come_twice(judging: SandboxLane) -> None:
    call = [tensor("x", 600), tensor("slots", 600, dtype="int64"), tensor("out", 600), number("n", 600)]
    added = SCATTER.replace("tl.store(", "tl.atomic_add(")
    for request in (subject(added, call), subject(added, call, zeroed=("out",))):
        result = known(judging, request)
        assert (result.rows_of, result.updates) == ("", ("out",))
        assert judged(judging, request, SCATTER).verdict.judgement is Judgement.REJECTED


OWN_INPUTS = """
import torch
import triton


class kernel:
    arg_names = ["table", "index", "out", "n", "BLOCK"]


def inputs(random):
    n, entries = random.randrange(2, 700), random.randrange(2, 90)
    return {
        "table": torch.randn(entries),
        "index": torch.randint(0, entries, (n,), dtype=torch.int32),
        "out": torch.empty(n),
        "n": n,
        "grid": lambda meta: (triton.cdiv(n, meta["BLOCK"]),),
    }
"""


def test_calls_of_a_users_own(judging: SandboxLane, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_INPUTS)
    request = BaseKernel(
        "kernel", GATHER, CONFIGS, file=str(tmp_path / "mine.py"), name="kernel", inputs=True
    )
    result = known(judging, request)
    assert result.writes == ("out",)
    call = [tensor("table", 50), tensor("index", 333, dtype="int32"), tensor("out", 333), number("n", 333)]
    assert covers(result.signature, problem(call))
    assert judged(judging, request, GATHER.replace("other=0)", "other=1)")).verdict.accepted
    wrong = GATHER.replace("tl.load(table + at,", "tl.load(table + at + (at > 60),")
    assert codes(judged(judging, request, wrong)) <= {ReasonCode.WRONG_VALUES, ReasonCode.NONDETERMINISTIC}


CONSTANTS = """import triton
import triton.language as tl


@triton.jit
def kernel(x, out, n, BLOCK: tl.constexpr, DTYPE: tl.constexpr, NOTHING: tl.constexpr, PAIR: tl.constexpr,
           MODE: tl.constexpr, SHAPE, ACTIVATION: tl.constexpr, LIMIT):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0).to(DTYPE)
    if NOTHING is None and MODE.name == "ROUGH":
        value = ACTIVATION(value) * PAIR[1][0] + SHAPE[1] * tl.load(SHAPE[2])
    tl.store(out + at, tl.minimum(value.to(PAIR[0]), LIMIT), mask=at < n)
"""
CONSTANT_INPUTS = """

import enum

import torch


class Mode(enum.Enum):
    EXACT = 1
    ROUGH = 2


@triton.jit
def square(v):
    return v * v


def inputs(random):
    n = random.randrange(2, 700)
    return {
        "x": torch.randn(n), "out": torch.empty(n), "n": n, "DTYPE": tl.float16, "NOTHING": None,
        "PAIR": (tl.float32, (3, None)), "MODE": Mode.ROUGH, "SHAPE": (n, 5, torch.ones(3)), "ACTIVATION": square,
        "LIMIT": float("inf"), "grid": lambda meta: (triton.cdiv(n, meta["BLOCK"]),),
    }
"""


def test_every_constant_that_triton_takes_reaches_the_kernel(judging: SandboxLane, tmp_path: Path) -> None:
    mine = tmp_path / "constants.py"
    mine.write_text(CONSTANTS + CONSTANT_INPUTS)
    request = BaseKernel("kernel", CONSTANTS, CONFIGS, file=str(mine), name="kernel", inputs=True)
    assert judged(judging, request, CONSTANTS.replace("PAIR[1][0] +", "(2 + 1) +")).verdict.accepted
    assert not judged(judging, request, CONSTANTS.replace(".to(DTYPE)", "")).verdict.accepted
    mine.write_text(CONSTANTS + CONSTANT_INPUTS.replace("(n, 5, torch.ones(3))", "object()"))
    with pytest.raises(
        VariantError, match=r"inputs\(\) gave SHAPE: a object cannot be handed .*: constants are numbers"
    ):
        survey(request, judging, plan=QUICK)


DESCRIBED = HEAD + (
    "def kernel(x, out, BLOCK: tl.constexpr):\n"
    "    at = [tl.program_id(0) * 4, tl.program_id(1) * 64]\n"
    "    out.store(at, x.load(at) * 2)\n"
)
DESCRIBED_INPUTS = """

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


def inputs(random):
    shape = random.randrange(2, 40), 16 * random.randrange(1, 9)
    x, out = (TensorDescriptor.from_tensor(t, [4, 64]) for t in (torch.randn(shape), torch.empty(shape)))
    return {"x": x, "out": out, "grid": (triton.cdiv(shape[0], 4), triton.cdiv(shape[1], 64))}
"""


def test_descriptors_that_inputs_makes_are_made_again_in_the_cell(
    judging: SandboxLane, tmp_path: Path
) -> None:
    (tmp_path / "described.py").write_text(DESCRIBED + DESCRIBED_INPUTS)
    request = BaseKernel(
        "kernel", DESCRIBED, CONFIGS, file=str(tmp_path / "described.py"), name="kernel", inputs=True
    )
    assert known(judging, request).writes == ("out",)
    assert judged(judging, request, DESCRIBED.replace("* 2", "+ x.load(at)")).verdict.accepted
    assert codes(judged(judging, request, DESCRIBED.replace("* 2", "* 3"))) == {ReasonCode.WRONG_VALUES}


UNFIT = HEAD + (
    "def kernel(x, out, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):\n"
    "    tl.static_assert(BLOCK * WIDTH <= 8192)\n"
    "    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
    "    tl.store(out + i, WIDTH * tl.load(x + i, mask=i < n), mask=i < n)\n"
)
UNFIT_INPUTS = """

import itertools

import torch

kernel = triton.heuristics({"WIDTH": lambda given: 128 if given["n"] % 2 else 64})(kernel)
SIZES = itertools.chain((600, 402), itertools.cycle((301, 298, 33)))


def inputs(random):
    n = next(SIZES)
    return {
        "x": torch.randn(n), "out": torch.empty(n), "n": n,
        "grid": lambda meta: (triton.cdiv(n, meta["BLOCK"]),),
    }
"""


def test_a_config_that_does_not_fit_a_drawn_call_gives_way_to_another(
    judging: SandboxLane, tmp_path: Path
) -> None:
    (tmp_path / "unfit.py").write_text(UNFIT + UNFIT_INPUTS)
    request = BaseKernel(
        "kernel", UNFIT, CONFIGS, file=str(tmp_path / "unfit.py"), name="kernel", inputs=True
    )
    assert known(judging, request).config == CONFIGS[1], "it runs on what is drawn first"
    result = judged(judging, request, UNFIT.replace("WIDTH * tl.load", "(WIDTH + 0) * tl.load"))
    assert result.verdict.accepted, result.verdict.reasons
    assert codes(judged(judging, request, UNFIT.replace("WIDTH * tl.load", "64 * tl.load"))) == {
        ReasonCode.WRONG_VALUES
    }
    narrow = dataclasses.replace(request, configs=(Config.of({"BLOCK": 1 << 14}),))
    with pytest.raises(VariantError, match="does not run in Triton's interpreter on what inputs"):
        survey(narrow, judging, plan=QUICK)


def test_recorded_constants_are_drawn_as_they_were(tmp_path: Path) -> None:
    import triton.language as tl

    (tmp_path / "recorded_constants.py").write_text(CONSTANTS)
    kernel = find_kernel(import_file(tmp_path / "recorded_constants.py"), "kernel")
    given = {"n": 5, "PAIR": (tl.float16, (3, None)), "DTYPE": tl.bfloat16}
    arguments = frameworks.triton().arguments_of(kernel, given)
    stored = tuple(Argument.from_json(json.loads(json.dumps(a.to_json()))) for a in arguments)
    assert all(isinstance(a.value, int | str) for a in stored)
    source = RecordedCalls(BaseKernel("kernel", CONSTANTS, CONFIGS, (stored,)), "cpu")
    assert {**source.draw("normal", torch.Generator()).scalars, "n": 5} == given


def test_what_cannot_be_drawn_is_said_with_a_remedy(judging: SandboxLane, tmp_path: Path) -> None:
    call = [tensor("table", 50), tensor("index", 333, dtype="int32"), tensor("out", 333), number("n", 333)]
    far = GATHER.replace("table + at", "table + at * 100000000")
    with pytest.raises(VariantError, match=r"function inputs\(random\) that returns"):
        survey(subject(far, call), judging, plan=QUICK)
    with pytest.raises(VariantError, match="launch grid of no config is known: let the kernel be tuned once"):
        survey(BaseKernel("kernel", DOUBLE, CONFIGS, (tuple(vector_call()),)), judging, plan=QUICK)
    mine = tmp_path / "mine.py"
    mine.write_text(
        DOUBLE
        + "\n\ndef inputs(random):\n    import torch\n    return {'x': torch.ones(9), 'out': torch.ones(9), 'n': 9}\n"
    )
    request = BaseKernel("kernel", DOUBLE, CONFIGS, file=str(mine), name="kernel", inputs=True)
    with pytest.raises(VariantError, match="must give it under 'grid'"):
        survey(request, judging, plan=QUICK)


def test_a_few_calls_hold_all_kinds_of_sizes() -> None:
    """Whatever is drawn: one of each size that is odd, for every config, too, and one beyond all tiles."""
    import torch

    source = RecordedCalls(MATRICES, "cpu")
    generator = torch.Generator().manual_seed(0)
    rows, columns = zip(
        *(source.draw("normal", generator).arguments[0].shape for _ in range(200)), strict=True
    )
    for sizes in (rows, columns):
        even = [n % 16 == 0 for n in sizes]
        assert 30 < sum(even) < 170, "both kinds are drawn"
        assert not any(all(n % 2 == 0 for n in sizes[i : i + 3]) for i in range(198))
    each = [source.draw("normal", generator, CONFIGS[n % 2]).arguments[0].shape for n in range(100)]
    for shapes in (each[::2], each[1::2]):
        assert all(any(s[axis] % 2 for s in shapes[i : i + 3]) for i in range(48) for axis in (0, 1))
    largest = max(c.parameters()["BLOCK"] for c in CONFIGS)
    assert all(max(columns[i : i + 4]) > largest for i in range(0, 200, 4))


# --- verdicts ---

ACCEPTED = {
    "two elements a lane": (
        VECTORS,
        DOUBLE.replace(
            "@triton.jit",
            'CONFIGS = [{"kwargs": {"BLOCK": 32}}, {"kwargs": {"BLOCK": 256}, "num_warps": 8}]\n\n\n'
            "def grid(meta, arguments):\n"
            '    return (triton.cdiv(arguments["n"], 2 * meta["BLOCK"]),)\n\n\n@triton.jit',
        ).replace("* BLOCK + tl.arange(0, BLOCK)", "* BLOCK * 2 + tl.arange(0, 2 * BLOCK)"),
    ),
    "another order of sums": (
        MATRICES,
        SOFTMAX.replace("tl.sum(part, axis=0)", "tl.sum(tl.sum(part.reshape([8, BLOCK]), axis=0), axis=0)"),
    ),
    "zeroed, then added into": (
        VECTORS,
        DOUBLE.replace("@triton.jit", 'RESET_TO_ZERO = ["out"]\n\n\n@triton.jit').replace(
            "tl.store(", "tl.atomic_add("
        ),
    ),
    "left in a workspace, stored by who comes last": (
        VECTORS,
        DOUBLE.replace(
            "@triton.jit",
            "def grid(meta, arguments, base):\n    return (*base, 3)\n\n\n"
            "def workspace(meta, arguments, base, grid):\n"
            '    return base[0] * meta["BLOCK"], base[0]\n\n\n@triton.jit',
        )
        .replace("BLOCK: tl", "WORKSPACE, COUNTERS, BLOCK: tl")
        .replace("tl.store(out + i, ", "tl.store(WORKSPACE + i, ")
        + "    if tl.atomic_add(COUNTERS + tl.program_id(0), 1) == 2:\n"
        "        tl.store(out + i, tl.load(WORKSPACE + i), mask=i < n)\n",
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ACCEPTED)
def test_right_variants_are_accepted_and_admitted(judging: SandboxLane, name: str) -> None:
    request, source = ACCEPTED[name]
    built = variant(source)
    result = judged(judging, request, built)
    assert result.verdict.accepted, result.verdict.reasons
    (check,) = result.checks
    assert (check.device, check.passed) == (INTERPRETER, True)
    assert "launches, harness" in check.detail
    assert ("more memory at a time" in check.detail) == ("workspace" in name)
    verified = Variant(**{**vars(built), "checks": result.checks})
    assert admitted(verified, problem(request.calls[0]))


REFUSED = {
    "no maximum": (
        MATRICES,
        SOFTMAX.replace("high = tl.max(value, axis=0)", "high = 0.0"),
        {ReasonCode.WRONG_VALUES},
    ),
    "one block only": (
        MATRICES,
        SOFTMAX.replace("mask=i < n)", "mask=i < tl.minimum(n, BLOCK))"),
        {ReasonCode.WRONG_VALUES},
    ),
    "two bits lost": (
        MATRICES,
        SOFTMAX.replace("result.to(out", "result.to(tl.bfloat16).to(out"),
        {ReasonCode.WRONG_VALUES},
    ),
    "strides taken for sizes": (MATRICES, SOFTMAX.replace("out + row * n", "out + row * BLOCK"), None),
    "a mask too wide": (
        VECTORS,
        DOUBLE.replace("mask=i < n)\n", "mask=i <= n)\n"),
        {ReasonCode.OUT_OF_BOUNDS},
    ),
    "writes its input": (
        VECTORS,
        DOUBLE.replace(
            "tl.store(out", "tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)\n    tl.store(out"
        ),
        None,
    ),
    "reads what lies behind": (
        VECTORS,
        DOUBLE.replace("tl.load(x + i, mask=i < n)", "tl.load(x + i + (i == n - 1))"),
        None,
    ),
    "right for multiples of 16": (
        VECTORS,
        DOUBLE.replace("2 * tl.load", "(2 + (n % 16 != 0)) * tl.load"),
        {ReasonCode.WRONG_VALUES},
    ),
    "an epsilon of the other sign": (
        subject(NORM, softmax_call(), grid=rows),
        NORM.replace("+ 1e-4", "- 1e-4"),
        {ReasonCode.WRONG_VALUES},
    ),
    "crashes": (VECTORS, DOUBLE.replace("x + i,", "x + i * 1000000000000,"), {ReasonCode.FAILS}),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", REFUSED)
def test_wrong_variants_are_refused(judging: SandboxLane, name: str) -> None:
    request, source, wanted = REFUSED[name]
    built = variant(source)
    result = judged(judging, request, built)
    assert result.verdict.judgement is Judgement.REJECTED
    assert wanted is None or codes(result) == wanted, result.verdict.reasons
    (check,) = result.checks
    assert not check.passed
    assert check.detail.partition(":")[0] == str(result.verdict.reasons[0].code)
    assert not admitted(Variant(**{**vars(built), "checks": result.checks}), problem(request.calls[0]))


def test_a_variant_that_hangs_is_ended(judging: SandboxLane) -> None:
    hangs = DOUBLE.replace("    tl.store", "    while n > 0:\n        n = n + 0\n    tl.store")
    result = judged(judging, VECTORS, hangs, limits=dataclasses.replace(VARIANT_LIMITS, wall_s=6.0))
    assert codes(result) == {ReasonCode.TIMEOUT}
    assert [c.passed for c in result.checks] == [False]


WRITES = """import pathlib

pathlib.Path({path!r}).write_text("imported")

"""


def test_nothing_of_a_variant_runs_in_the_parent(judging: SandboxLane, tmp_path: Path) -> None:
    """Its import writes a file: refused by its text, it is not even imported in a cell."""
    before = set(sys.modules)
    trace = tmp_path / "imported"
    result = judged(judging, VECTORS, WRITES.format(path=str(trace)) + DOUBLE)
    assert codes(result) == {ReasonCode.FAILS}
    judged(judging, VECTORS, DOUBLE.replace("2 *", "3 *"))
    assert not trace.exists()
    assert not {n for n in set(sys.modules) - before if "variant_kernel" in n or n == "candidate"}


def test_every_config_of_a_variant_is_run(judging: SandboxLane) -> None:
    late = DOUBLE.replace("2 * tl", "(2 + (BLOCK == 32)) * tl").replace(
        "@triton.jit",
        'CONFIGS = [{"kwargs": {"BLOCK": b}} for b in (128, 64, 256, 512, 32)]\n\n\n@triton.jit',
    )
    result = judged(judging, VECTORS, late)
    assert codes(result) == {ReasonCode.WRONG_VALUES}
    without = Variant(**{**vars(variant(late)), "configs": (Config.of({"BLOCK": 64}),)})
    assert judged(judging, VECTORS, without).verdict.accepted


def test_a_broken_harness_blames_nobody(judging: SandboxLane) -> None:
    request = dataclasses.replace(VECTORS, source=DOUBLE.replace("2 * tl", "unknown * tl"))
    result = verify_variant(
        variant(DOUBLE), request, known(judging, VECTORS), judging, device=INTERPRETER, plan=QUICK
    )
    assert result.verdict.judgement is Judgement.INFRASTRUCTURE
    assert result.checks == ()


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
        self.unable: dict[Hashable, Exception] = {}
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


def test_a_verdict_on_a_kernel_counts_the_launches_that_were_checked(judging: SandboxLane) -> None:
    verdict = judged(judging, VECTORS, DOUBLE).verdict
    assert 0 < verdict.checked.launches <= verdict.trials
