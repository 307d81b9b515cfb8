"""Kernels without a tuner: their verified variants are served, and nothing else of them changes."""

from __future__ import annotations

import functools
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from forecast_autotune import autotune
from forecast_autotune.records.program import PLAN_FILE, RecordingPlan
from forecast_autotune.store import Store
from forecast_integrations.triton import engine, untuned
from forecast_integrations.triton.program_recording import ProgramRecorder
from forecast_integrations.triton.untuned import serving
from forecast_integrations.triton.variants import loading
from forecast_integrations.triton.variants.loading import CompiledVariant
from tests.integrations.triton.test_variants_live import arguments, checked, record

pytestmark = pytest.mark.usefixtures("shared_cache")


@triton.jit
def plain(x, out, n, BLOCK: tl.constexpr):
    """out = 2 x."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def alone(x, out, n, BLOCK: tl.constexpr):
    """out = 2 x, and no variant of it is known."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


class Kept:
    """A wrapper that keeps what the first launch returned, and launches that from then on."""

    def __init__(self, fn: Any) -> None:
        self.fn, self.kernel = fn, None

    def __getitem__(self, grid: Any) -> Any:
        return functools.partial(self.run, grid=grid, warmup=False)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self.kernel is None:
            self.kernel = self.fn.run(*args, **kwargs)
        else:
            self.kernel[kwargs["grid"]](*args)
        return self.kernel


@Kept
@triton.heuristics({"BLOCK": lambda named: 128})
@triton.jit
def wrapped(x, out, n, BLOCK: tl.constexpr):
    """out = 2 x, below a wrapper."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


FAST = """import triton
import triton.language as tl

CONFIGS = [{"num_warps": 4, "num_stages": 3}]


@triton.jit
def plain(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    tl.store(out + i, value + value, mask=i < n)
"""


@pytest.fixture
def served(device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("FORECAST_AUTOTUNE_VARIANTS", "store")
    monkeypatch.setenv("FORECAST_AUTOTUNE_MODE", "exhaustive")
    monkeypatch.setattr(triton.JITFunction, "run", serving(triton.JITFunction.run))
    for kernel in (plain, alone, wrapped.fn.fn):
        vars(kernel).pop(untuned.ENTRY, None)
    for kernel in (plain, wrapped.fn.fn):
        source = FAST.replace("plain", kernel.__name__)
        checks = checked(args=(*arguments(), 128), kernel=kernel)
        Store.default(tmp_path / "measurements").put_variant(record(source, checks, kernel=kernel))
    return device


def test_a_verified_variant_is_launched_for_the_calls_that_it_was_verified_for(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, out, n = arguments()
    kernel = plain[(32,)](x, out, n, BLOCK=128, num_warps=1, num_stages=1)
    assert (kernel.metadata.num_warps, kernel.metadata.num_stages) == (4, 3)
    before = served.launches
    assert plain[(32,)](x, out, n, BLOCK=128, num_warps=1, num_stages=1).metadata.num_warps == 4
    assert served.launches == before + 1
    # Numbers that are no sizes, as seeds are, decide nothing.
    plain[(32,)](x, out, 4095, BLOCK=128, num_warps=1, num_stages=1)
    made, making = list[Any](), untuned.ServedKernel._tuner
    monkeypatch.setattr(untuned.ServedKernel, "_tuner", lambda *given: made.append(1) or making(*given))
    before = served.launches
    for number in range(3001, 3016):
        plain[(32,)](x, out, number, BLOCK=128, num_warps=1, num_stages=1)
    assert (served.launches, len(made) <= 2) == (before + 15, True), (
        "their class is all that a form holds of them"
    )
    for _ in range(2):
        assert wrapped[(32,)](*arguments(), num_warps=1).metadata.num_warps == 4
    assert served.launches > before + 2
    half = arguments(dtype=torch.float16)
    assert plain[(32,)](*half, BLOCK=128, num_warps=1).metadata.num_warps == 1


def test_a_call_of_a_form_that_was_met_is_launched_as_the_first_one_unless_anything_else_has_changed(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, out, n = arguments()
    seen: list[Any] = []

    def launched(x: Any = x, out: Any = out, grid: Any = (32,)) -> Any:
        before = served.launches
        kernel = plain[grid](x, out, n, BLOCK=128, num_warps=1)
        assert served.launches == before + 1
        return kernel.metadata

    for _ in range(2):
        plain[(32,)](x, out, n, BLOCK=128, num_warps=1)
        assert launched().num_warps == launched(grid=lambda given: seen.append(given) or [1]).num_warps == 4
    assert {(given["n"], given["BLOCK"], given["x"] is x) for given in seen} == {(n, 128, True)}
    # Tensors that overlap, or begin elsewhere, are the base's.
    assert [launched(x, y).num_warps for y in (x, x[8:], torch.empty(2 * n)[1::2], out)] == [1, 1, 1, 4]
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "debug", True)
        assert [launched().debug for _ in range(2)] == [True, True]
    assert not launched().debug
    run = triton.JITFunction.run

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(triton.JITFunction, "run", noted)
    seen.clear()
    assert launched().num_warps == launched().num_warps == 4
    assert [kernel is plain for kernel in seen] == [True, False] * 2


def test_an_improvement_is_proved_by_blocks_with_a_variant_and_without_in_turns(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_launch", engine._launch)  # for the recorder, which changes them
    monkeypatch.setattr(untuned.ServedKernel, "run", untuned.ServedKernel.run)
    again, launch = list[int](), CompiledVariant._launch
    monkeypatch.setattr(CompiledVariant, "_launch", lambda *given: again.append(1) or launch(*given))
    plan = RecordingPlan(marker="plain", block=4, settling=1, served_first=True)
    (tmp_path / PLAN_FILE).write_text(json.dumps(plan.to_json()))
    recorder = ProgramRecorder(tmp_path)
    recorder._serve_in_turns()
    x, out, n = arguments()
    kept, plain_ones, wrapped_ones = Kept(wrapped.fn), list[int](), list[bool]()
    for _ in range(22):  # what a wrapper keeps takes turns, too
        plain_ones.append(plain[(32,)](x, out, n, BLOCK=128, num_warps=1).metadata.num_warps)
        before = len(again)
        kept[(32, 1, 1)](x, out, n, num_warps=1)
        wrapped_ones.append(len(again) > before)
    assert plain_ones == [4] * 8 + [1] * 8 + [4] * 6
    assert wrapped_ones == [False] + [True] * 6 + [False] * 8 + [True] * 7, "the first one is its tuner's"
    launched = [(name, 0.0, 1e-3 * number) for number in range(22) for name in ("plain", "wrapped")]
    found = recorder.turns.blocks([*launched, ("past", 0.0, 1e-3)])
    assert [(b.served, b.seconds > 0, b.peak_bytes > 0) for b in found] == [
        (served, True, True) for served in (True, False, False, True)
    ]
    assert [round(1e3 * b.median_s["plain"]) for b in found] == [6, 10, 14, 18]  # the first one settles
    assert recorder.turns.unturned == ["past"]


def test_results_are_compared_on_tensors_that_autograd_has_saved(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (engine, loading):
        monkeypatch.setattr(module, "launch_variant", loading.launch_variant)
    (tmp_path / PLAN_FILE).write_text(json.dumps(RecordingPlan(compare=True).to_json()))
    recorder = ProgramRecorder(tmp_path)
    recorder._compare_variants()
    x, out, n = arguments()
    weight = torch.nn.Parameter(torch.ones_like(x))
    squared = (out := weight + 1).pow(2)  # its backward pass has saved `out`
    assert plain[(32,)](weight, out, n, BLOCK=128, num_warps=1).metadata.num_warps == 4
    assert recorder._differences == {"plain": 0.0}
    squared.sum().backward()


@pytest.mark.parametrize(("name", "warps"), [("plain", 4), ("alone", 1)])
def test_a_kernel_that_a_program_makes_anew_is_let_go(
    served: Any, monkeypatch: pytest.MonkeyPatch, name: str, warps: int
) -> None:
    seen = []
    for _ in range(2):
        kernel = triton.jit(globals()[name].fn)
        with monkeypatch.context() as patch:
            patch.setitem(globals(), name, kernel)
            assert kernel[(32,)](*arguments(), BLOCK=128, num_warps=1).metadata.num_warps == warps
        seen.append(weakref.ref(kernel))
        del kernel
    gc.collect()
    assert seen[0]() is None, "the last one may still be at hand"


def test_other_kernels_and_those_with_a_tuner_are_left(served: Any) -> None:
    assert alone[(32,)](*arguments(), BLOCK=128, num_warps=2).metadata.num_warps == 2
    tuner = autotune([triton.Config({"BLOCK": 128}, num_warps=2)], key=["n"], store=False, variants=[])(
        triton.jit(plain.fn)
    )
    assert tuner[(32,)](*arguments()).metadata.num_warps == 2
