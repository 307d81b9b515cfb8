"""A call as a record: its arguments, options, descriptors and grids, and the source of its kernel."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from forecast_autotune import autotune
from forecast_autotune.records import Argument, Config, Device, Kernel, Problem, digest
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.describe import call_arguments, call_kind, problem_identity
from forecast_integrations.triton.problem.rebuilt_call import RebuildError, rebuilt_arguments, rebuilt_value
from forecast_integrations.triton.problem.source import innermost, source_hash, source_of
from tests.integrations.null import fresh

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"


@triton.jit
def plain(x, n, BLOCK: tl.constexpr):
    pass


@triton.jit
def with_warps(x, n, BLOCK: tl.constexpr, num_warps: tl.constexpr):
    pass


LISTED = [triton.Config({"BLOCK": b}, num_warps=w) for b, w in itertools.product((16, 64), (1, 2, 4))]


def asked(fn: Any, grid: Any = None) -> tuple[int, dict[str, tuple[int, ...]]]:
    """How often the grid function is called, and the grids by config."""
    calls: list[dict[str, Any]] = []

    def count(meta: dict[str, Any]) -> tuple[int, ...]:
        calls.append(meta)
        extent: tuple[int, ...] = grid(meta) if grid else (meta["n"] // meta["BLOCK"],)
        return extent

    found = describe.launch_grids(describe.configs_by_candidate(LISTED), count, {"x": None, "n": 128}, fn)
    return len(calls), {str(c): extent for c, extent in found.items()}


def test_a_twin_keeps_every_value_and_its_type() -> None:
    listed: list[dict[str, Any]] = [{"A": 1}, {"A": True}, {"A": 1.0}, {"A": [1]}, {"A": "1", "B": 2}, {}]
    configs = [triton.Config(kwargs, num_warps=2**i, maxnreg=32) for i, kwargs in enumerate(listed)]
    expected = [
        Config.of(c.kwargs, num_warps=c.num_warps, num_stages=c.num_stages, maxnreg=32) for c in configs
    ]
    assert [repr(c.config) for c in describe.configs_by_candidate(configs)] == list(map(repr, expected))
    assert [repr(describe.to_config(c)) for c in configs] == list(map(repr, expected))


class OwnConfig(triton.Config):  # type: ignore[misc]
    """A config of a library's, which launches with what its attributes do not say."""

    def __init__(self, size: int) -> None:
        super().__init__({}, num_warps=8)
        self.size = size

    def all_kwargs(self) -> dict[str, Any]:
        return {"BLOCK": self.size, "num_warps": 2}


def test_a_config_is_what_it_launches_with() -> None:
    found = list(describe.configs_by_candidate([OwnConfig(size) for size in (128, 256, 512)]))
    assert [c.config for c in found] == [Config.of({"BLOCK": b}, num_warps=2) for b in (128, 256, 512)]


def test_a_file_of_ir_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    file = tmp_path / "kernel.ttgir"
    config = triton.Config({"BLOCK": 128}, ir_override=str(file))
    missing = describe.to_config(config)
    assert missing.ir_override == str(file)
    seen = {missing}
    for text in ("one", "another", "one"):
        file.write_text(text)
        seen.add(found := describe.to_config(config))
        assert found.parameters()["ir_override"] == str(file)
    assert len(seen) == 3


def test_configs_of_one_assignment_share_their_pairs() -> None:
    found = list(describe.configs_by_candidate(LISTED))
    assert len({id(c.config.kwargs) for c in found}) == 2
    assert len(found) == 6


def test_a_grid_is_asked_once_per_assignment() -> None:
    calls, found = asked(plain)
    assert calls == 2
    assert len(found) == 6
    assert set(found.values()) == {(8,), (2,)}
    assert asked(plain, lambda meta: (meta["unknown"],)) == (2, {}), "one that cannot say is not asked again"


def test_where_launch_options_are_parameters_or_heuristics_may_read_them_each_candidate_is_asked() -> None:
    calls, found = asked(with_warps, lambda meta: (meta["num_warps"],))
    assert (calls, found["BLOCK=16 warps=2 stages=3"]) == (6, (2,))
    calls, found = asked(triton.heuristics({"n": lambda args: 128 * args["num_warps"]})(plain))
    assert (calls, found["BLOCK=16 warps=4 stages=3"]) == (6, (32,))


def problem_of(fn: Any = plain, **named: Any) -> Problem:
    return describe.describe(fn, describe.kernel_record(fn), {"x": None, "n": 8, **named}, (8,), (1,))


def test_a_call_without_launch_options_has_the_identity_it_always_had(device: Any) -> None:
    """Stores hold what was measured under it."""
    bare = problem_of(grid=(1,), warmup=False)
    arguments = [Argument("x", "none"), Argument("n", "scalar", "i32", value=8)]
    identity = [digest(["8"]), ["x", "none", ""], ["n", "i32", "n"]]
    expected = Problem.of(
        describe.kernel_record(plain),
        arguments,
        bare.device,
        key=["8"],
        toolchain=dict(bare.toolchain),
        identity=identity,
    )
    assert (bare.id, bare.extra) == (expected.id, {})


@pytest.mark.parametrize("options", [{"maxnreg": 32}, {"debug": True}, {"fp8": ("e5",)}])
def test_launch_options_tell_calls_apart(device: Any, options: dict[str, Any]) -> None:
    bare, given = problem_of(), problem_of(**options)
    assert bare.id != given.id != problem_of(**dict.fromkeys(options)).id
    assert describe.call_kind(bare, plain) != describe.call_kind(given, plain)
    assert describe.call_form(plain, (None, 8), options) != describe.call_form(plain, (None, 8), {})
    read = Problem.from_json(json.loads(json.dumps(given.to_json())))
    assert describe.resized_problem(read, read.arguments, read.key, read.grid).id == given.id


def times(factor: int) -> Any:
    """A JIT function of one name whatever it does."""
    by = tl.constexpr(factor)

    @triton.jit
    def epilogue(value):
        return value * by

    return epilogue


@triton.jit
def applied(x, n, F: tl.constexpr):
    pass


def test_functions_of_one_name_are_different_values() -> None:
    configs = [triton.Config({"F": f}) for f in (times(2), times(7), times(2), (times(2),), (times(7),))]
    found = list(describe.configs_by_candidate(configs))
    assert len({repr(c) for c in found}) == len(found) == 4
    again = describe.to_config(triton.Config({"F": times(2)}))
    assert again == found[0].config, "the same in another process"


@triton.jit
def applied_without_annotation(x, n, F):
    pass


@pytest.mark.parametrize("fn", [applied, applied_without_annotation])
def test_the_source_of_a_function_that_is_passed_counts(device: Any, fn: Any) -> None:
    name = fn.arg_names[-1]
    two, seven = (problem_of(fn, **{name: times(factor)}) for factor in (2, 7))
    assert two.id != seven.id
    assert two.id == problem_of(fn, **{name: times(2)}).id
    assert describe.call_kind(two, fn) != describe.call_kind(seven, fn)
    with pytest.raises(RebuildError, match=f"{name} is a JIT function"):
        rebuilt_arguments(two, fn.arg_names)


SOURCE = """
import triton, triton.language as tl
import helper_module as hm
{above}
SCALE = tl.constexpr({scale})
OTHER = tl.constexpr({other})
n = {n}
column = {n}

@triton.jit
def inner(x):
    return x * {factor}

@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    value = inner(tl.load(x + column, mask=column < n)) * SCALE
    tl.store(x + column, hm.outer(value), mask=column < n)
"""
HELPER = """
import triton

@triton.jit
def outer(x):
    return x + {term}
"""
Build = Callable[..., Any]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Write the module with these values, import it, and return its kernel."""
    made = iter(range(100))

    def load(name: str, text: str) -> Any:
        path = tmp_path / f"{name}_{next(made)}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(__import__("sys").modules, name, module)
        spec.loader.exec_module(module)
        return module

    def build(helper: str = "helper_module", **values: Any) -> Any:
        given = {"above": "", "scale": 2, "other": 3, "n": 4, "factor": 5, "term": 6, **values}
        load(helper, HELPER.format(**given))
        text = SOURCE.replace("helper_module", helper).format(**given)
        return load("kernel_module", text).kernel

    return build


@pytest.mark.parametrize("change", [{"scale": 7}, {"factor": 7}, {"term": 7}])
@pytest.mark.parametrize("helper", ["helper_module", "triton_helpers_of_a_library"])
def test_what_the_kernel_uses_counts(build: Build, helper: str, change: dict[str, Any]) -> None:
    assert source_hash(build(helper)) != source_hash(build(helper, **change))


@pytest.mark.parametrize("change", [{"above": "# a comment\n\n"}, {"other": 7}, {"n": 7}])
def test_what_it_does_not_use_does_not(build: Build, change: dict[str, Any]) -> None:
    """Its place in the file, other globals, and globals that share a name with its arguments or locals."""
    assert source_hash(build()) == source_hash(build(**change))


def test_layers_above_do_not_count(build: Build) -> None:
    kernel = build()
    stacked = triton.autotune(configs=[triton.Config({"BLOCK": 16})], key=["n"])(
        triton.heuristics({"BLOCK": lambda args: 16})(kernel)
    )
    assert innermost(stacked) is kernel
    assert source_hash(stacked) == source_hash(kernel)
    assert source_of(stacked).startswith("def kernel(")


@triton.jit
def copy_tile(into, source, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    tile = source.load([tl.program_id(0) * ROWS, 0])
    # A block of another shape than the config's cannot be added to a tensor of the config's shape.
    into.store([tl.program_id(0) * ROWS, 0], tile + tl.zeros([ROWS, COLUMNS], dtype=tl.float16))


def set_blocks(named: dict[str, Any]) -> None:
    for name in ("into", "source"):
        named[name].block_shape = [named["ROWS"], named["COLUMNS"]]


def tile_configs() -> list[triton.Config]:
    return [
        triton.Config({"ROWS": rows, "COLUMNS": 64}, num_warps=warps, pre_hook=set_blocks)
        for rows in (16, 32, 64)
        for warps in (2, 4)
    ]


@pytest.mark.parametrize("compiler", ["fork", "threads"])
def test_every_config_compiles_with_its_own_blocks(
    device: Any, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_COMPILER", compiler)
    monkeypatch.setenv("FORECAST_AUTOTUNE_MODE", "exhaustive")
    tuner = autotune(configs=tile_configs(), key=[], store=False)(fresh(copy_tile))
    x, y = (
        TensorDescriptor.from_tensor(torch.empty(128, 64, dtype=torch.float16), [1, 64]) for _ in range(2)
    )
    tuner[lambda meta: (128 // meta["ROWS"],)](y, x)
    assert tuner.decision.measured == 6
    assert all(time > 0 for time in map(min, tuner.configs_timings.values()))


def described(descriptor: TensorDescriptor) -> Problem:
    arguments = call_arguments(copy_tile, {"into": descriptor, "source": descriptor})
    identity = problem_identity(arguments, [])
    return Problem.of(Kernel("copy_tile", "triton"), arguments, Device("nowhere"), identity=identity)


def test_a_descriptor_is_made_again_from_its_record() -> None:
    tensor = torch.empty(128, 96, dtype=torch.float16)[:, :64]
    problem = described(TensorDescriptor(tensor, [100, 64], [96, 1], [32, 64]))
    record = Problem.from_json(problem.to_json()).arguments[0]
    made = rebuilt_value(record)
    assert isinstance(made, TensorDescriptor)
    assert (made.shape, made.strides, made.block_shape) == ([100, 64], [96, 1], [32, 64])
    base = made.base
    assert (tuple(base.shape), base.stride(), base.dtype) == ((128, 64), (96, 1), torch.float16)


def test_calls_are_of_one_kind_whatever_block_a_hook_has_set() -> None:
    tensor = torch.empty(128, 64, dtype=torch.float16)
    one, other = (described(TensorDescriptor.from_tensor(tensor, [n, 64])) for n in (1, 32))
    assert one.id == other.id
    assert call_kind(one, copy_tile) == call_kind(other, copy_tile)


@pytest.mark.parametrize(
    "extra",
    [{}, {"block": [3, 64]}, {"block": ["a", 64]}, {"block": 7}, {"block": [16]}, {"strides": [63, 1]}],
)
def test_descriptors_that_cannot_be_made_are_refused(extra: dict[str, Any]) -> None:
    sound = {"shape": [128, 64], "strides": [64, 1], "block": [16, 64]}
    given = {"descriptor": {**sound, **extra} if extra else True}
    with pytest.raises(RebuildError, match="TMA descriptor"):
        rebuilt_value(Argument("a", "tensor", "float16", (128, 64), (64, 1), True, extra=given))
