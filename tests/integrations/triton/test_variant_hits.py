"""Calls that a decided variant serves: what reaches its kernel, and what is looked at in every call."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from forecast_autotune import autotune
from forecast_autotune.variants import Check, Origin, Provenance, Variant
from forecast_harness.targets.kernels.sizes import CallSizes
from forecast_integrations.device import current_device
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.variants.guard import may_overlap
from forecast_integrations.triton.variants.loading import VariantConfig
from tests.integrations.null import fresh

SLOW = [triton.Config({"BLOCK": b}, num_warps=1, num_stages=1) for b in (64, 128)]


@triton.jit
def scaled(x, GROUP: tl.constexpr, out, n, by, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, by * tl.load(x + i, mask=i < n), mask=i < n)


def text(parameters: str, before: str = "", factor: str = "by") -> str:
    return f"""import triton
import triton.language as tl

CONFIGS = [{{"kwargs": {{"BLOCK": 256}}, "num_warps": 4, "num_stages": 3}}]
{before}

@triton.jit
def scaled({parameters}):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, {factor} * tl.load(x + i, mask=i < n), mask=i < n)
"""


ALL = "x, GROUP: tl.constexpr, out, n, by, BLOCK: tl.constexpr"
OWN = """

def grid(meta, arguments, base):
    return (base[0], meta["num_warps"])

"""
SIZED = """

def workspace(meta, arguments, base, grid):
    return base[0] * meta["BLOCK"], grid[0] + meta["num_warps"]

"""
SOURCES = {
    "the same": text(ALL),
    "another order": text("x, out, n, by, BLOCK: tl.constexpr, GROUP: tl.constexpr"),
    "dropped": text("x, out, n, by, BLOCK: tl.constexpr"),
    "own grid": text(ALL, OWN),
    "the calls grid": text(ALL + ", BASE_GRID_0"),
    "own memory": text(ALL + ", WORKSPACE, COUNTERS", SIZED),
    "zeroes": text(ALL, 'RESET_TO_ZERO = ["out"]\n'),
}


def arguments(n: int = 4096, by: Any = 3) -> dict[str, Any]:
    return {"x": torch.ones(n), "GROUP": 8, "out": torch.ones(n), "n": n, "by": by}


def tuned(source: str) -> Any:
    base = describe.kernel_record(scaled)
    signature = CallSizes.of([describe.call_arguments(scaled, arguments())]).signature(["out"])
    made = Variant.of(base.name, base.source_sha256, source, Provenance(Origin.HAND))
    record = Variant(**{**vars(made), "checks": (Check(current_device().slug, signature, True),)})
    return autotune(SLOW, key=["n"], variants=[record], store=False, mode="exhaustive")(fresh(scaled))


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def decided(source: str) -> tuple[Any, list[dict[str, Any]]]:
    """A tuner whose variant has won, and what reaches the variant's kernel from now on."""
    tuner = tuned(source)
    tuner[grid](*arguments().values())
    config = tuner.best_config
    assert isinstance(config, VariantConfig)
    kernel, seen = config.function.kernel, list[dict[str, Any]]()
    parameters = inspect.signature(kernel.fn)

    def note(*args: Any, **kwargs: Any) -> None:
        taken = {n: v for n, v in kwargs.items() if n in parameters.parameters}
        seen.append(parameters.bind(*args, **taken).arguments)

    kernel.add_pre_run_hook(note)
    return tuner, seen


@pytest.mark.sampled(6)
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("positions", [5, 2, 1, 0])
def test_however_a_call_is_written_the_kernel_gets_its_arguments(
    device: Any, source: str, positions: int
) -> None:
    tuner, seen = decided(source)
    given = arguments()
    values, names = list(given.values()), list(given)
    rest = dict(zip(names[positions:], values[positions:], strict=True))
    for _ in range(2):
        compiled = tuner[grid](*values[:positions], **rest)
        assert isinstance(tuner.best_config, VariantConfig)
        assert (compiled.metadata.num_warps, compiled.metadata.num_stages) == (4, 3)
        found = seen.pop()
        assert found.pop("BASE_GRID_0", 16) == 16
        memory = [found.pop(n) for n in ("WORKSPACE", "COUNTERS") if n in found]
        assert [(m.dtype, len(m)) for m in memory] in ([], [(torch.float32, 4096), (torch.int32, 20)])
        assert bool(memory) == ("workspace" in source)
        expected = {**given, "BLOCK": 256}
        assert found == {n: expected[n] for n in found}
        assert {"x", "out", "n", "by", "BLOCK"} <= set(found)
    assert (given["out"].sum() == 0) == ("RESET_TO_ZERO" in source)


@pytest.mark.parametrize("where", [(16,), [16], grid])
def test_the_launch_grid_is_the_calls(device: Any, where: Any) -> None:
    tuner, seen = decided(SOURCES["the calls grid"])
    tuner[where](**arguments())
    assert seen.pop()["BASE_GRID_0"] == 16


@pytest.mark.parametrize("named", [False, True])
def test_a_hit_is_described_once_and_looked_at_always(
    device: Any, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    tuner, _ = decided(SOURCES["the same"])
    asked = []
    describing = describe.describe
    monkeypatch.setattr(describe, "describe", lambda *given: asked.append(1) or describing(*given))

    def variant(**changed: Any) -> bool:
        given = {**arguments(), **changed}
        _ = tuner[grid](**given) if named else tuner[grid](*given.values())
        return isinstance(tuner.best_config, VariantConfig)

    assert variant()
    count = len(asked)
    assert variant()
    assert variant(x=torch.empty(4096), out=torch.empty(4096))
    assert len(asked) == count, "nothing that a check looks at has changed"
    whole = torch.empty(8192)
    assert not variant(x=whole[:4096], out=whole[2048:6144])
    assert not variant(out=torch.empty(8192)[::2])
    assert not variant(x=whole[1:4097])
    assert not variant(by=3.0)
    assert not variant(GROUP=16)
    assert not variant(by=True)
    assert variant()


def test_a_tensor_that_was_changed_in_place_is_looked_at_again(device: Any) -> None:
    tuner, _ = decided(SOURCES["the same"])
    given = arguments()
    tuner[grid](**given)
    assert isinstance(tuner.best_config, VariantConfig)
    given["out"].resize_(2048)
    tuner[grid](**given)
    assert not isinstance(tuner.best_config, VariantConfig)


def test_descriptors_overlap_by_the_tensor_they_describe() -> None:
    x = torch.empty(64, 64)
    over = TensorDescriptor.from_tensor(x, [16, 16])
    assert may_overlap({"x": over, "out": x}, frozenset({"out"}))
    assert may_overlap({"x": x, "out": over}, frozenset({"out"}))
    assert not may_overlap({"x": over, "out": torch.empty(64, 64)}, frozenset({"out"}))
