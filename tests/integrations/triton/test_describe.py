"""A call as a record: its arguments, options, descriptors and grids, and the source of its kernel."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from forecast_autotune import autotune, python_parser
from forecast_autotune.records import Argument, Config, Device, Kernel, Problem, digest
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.describe import call_arguments, call_kind, problem_identity
from forecast_integrations.triton.problem.rebuilt_call import RebuildError, rebuilt_arguments, rebuilt_value
from forecast_integrations.triton.problem.source import (
    innermost,
    normal_form_hash,
    source_hash,
    standalone_source,
)
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


@pytest.mark.parametrize("grid", [(-1, 2), lambda meta: (-1, 2)])
def test_a_grid_below_0_launches_nothing_and_is_0(grid: Any) -> None:
    assert describe.launch_grid(grid, {}, {}) == (0, 2)


def test_a_twin_keeps_every_value_and_its_type() -> None:
    listed: list[dict[str, Any]] = [{"A": 1}, {"A": True}, {"A": 1.0}, {"A": [1]}, {"A": "1", "B": 2}, {}]
    configs = [triton.Config(kwargs, num_warps=2**i, maxnreg=32) for i, kwargs in enumerate(listed)]
    expected = [
        Config.of(c.kwargs, num_warps=c.num_warps, num_stages=c.num_stages, maxnreg=32) for c in configs
    ]
    assert [repr(c.config) for c in describe.configs_by_candidate(configs)] == list(map(repr, expected))
    assert [repr(describe.to_config(c)) for c in configs] == list(map(repr, expected))


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


HEURISTIC_CALLS: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    # What is computed counts, not what it is computed from.
    ({"SIZE": lambda a: triton.next_power_of_2(a["n"])}, {"n": 9}, True),
    ({"SIZE": lambda a: triton.next_power_of_2(a["n"])}, {"n": 7}, False),
    ({"EVEN": lambda a: a["n"] % a["BLOCK"] == 0}, {"n": 64}, True),
    ({"EVEN": lambda a: a["n"] % a["BLOCK"] == 0}, {"n": 32}, True),
    ({"EVEN": lambda a: a["n"] % a["BLOCK"] == 0}, {"n": 7}, False),
    ({"EVEN": lambda a: a["num_warps"] > 1, "BOTH": lambda a: a["EVEN"] and a["n"]}, {"n": 7}, True),
    ({"ALL": lambda a: len({**a})}, {"n": 7}, False),
    ({"ALL": lambda a: max(v for v in dict(a).values() if isinstance(v, int))}, {"n": 77}, True),
    ({"SIZE": lambda a: a["x"].numel()}, {"x": torch.empty(5)}, True),
    ({"SIZE": lambda a: a["absent"]}, {"n": 7}, False),
]


@pytest.mark.parametrize(("values", "other", "differs"), HEURISTIC_CALLS)
def test_what_heuristics_compute_tells_problems_apart(
    device: Any, values: dict[str, Any], other: dict[str, Any], differs: bool
) -> None:
    """Both calls have one key. A config more, for which they compute nothing new, is the same problem."""

    def problem(listed: Any = LISTED[:-1], **named: Any) -> Problem:
        fn = triton.heuristics(values)(plain)
        given = {"x": torch.empty(7), "n": 5, **named}
        return describe.describe(fn, describe.kernel_record(fn), given, (1,), (1,), configs=listed)

    assert (problem().id != problem(**other).id) == differs
    assert problem().id == problem(LISTED).id


class Pair(NamedTuple):
    """A named tuple of tensors, as kernels take them."""

    left: Any
    right: Any


def test_members_of_tuples_are_recorded_as_arguments_and_made_again() -> None:
    x, y = torch.full((4, 6), 123.0)[:, ::2], torch.full((8,), 123, dtype=torch.int32)
    given = {"x": (x, Pair(y, (x, None)), 7, ()), "n": tl.constexpr(3), "BLOCK": (1, 2)}
    arguments = call_arguments(plain, given)
    assert [(a.name, a.kind, a.dtype, a.shape, a.stride) for a in arguments] == [
        ("x.0", "tensor", "float32", (4, 3), (6, 2)),
        ("x.1.left", "tensor", "int32", (8,), (1,)),
        ("x.1.right.0", "tensor", "float32", (4, 3), (6, 2)),
        ("x.1.right.1", "none", "", (), ()),
        ("x.2", "scalar", "i32", (), ()),
        ("x.3", "tuple", "", (), ()),
        ("n", "constexpr", "", (), ()),
        ("BLOCK", "constexpr", "tuple", (), ()),
    ]
    problem = Problem.of(Kernel("plain", "triton"), arguments, Device("nowhere"))
    read = Problem.from_json(json.loads(json.dumps(problem.to_json())))
    (first, pair, seven, empty), three, block = rebuilt_arguments(read, plain.arg_names)[0]
    assert (first.shape, first.stride(), pair.right[0].dtype, pair.right[1]) == (
        x.shape,
        x.stride(),
        x.dtype,
        None,
    )
    assert (pair._fields, pair.left.shape, seven, empty, three, block) == (
        ("left", "right"),
        y.shape,
        7,
        (),
        3,
        (1, 2),
    )


class Opaque:
    """Its text is an address."""


@pytest.mark.parametrize(
    "kind", [Opaque, lambda: np.full(3, 123.0), lambda: object(), lambda: [Opaque(), None]]
)
def test_an_object_is_known_by_its_type(device: Any, kind: Callable[[], Any]) -> None:
    """Another object of the type, here or in another process, makes no new problem; nobody can make it again."""
    one, again = (problem_of(BLOCK=kind(), x=kind(), other=kind()) for _ in range(2))
    assert one.id == again.id
    assert "123" not in json.dumps(one.to_json())
    with pytest.raises(RebuildError, match="cannot be made from its record"):
        rebuilt_arguments(one, plain.arg_names)


def test_dtypes_tell_problems_apart_and_are_made_again(device: Any) -> None:
    types = [torch.float16, torch.bfloat16, tl.float16, tl.bfloat16]
    problems = [problem_of(x=(dtype,), BLOCK=dtype) for dtype in types]
    assert len({p.id for p in problems}) == 4
    made = [rebuilt_arguments(p, plain.arg_names)[0] for p in problems]
    assert [(x, block) for x, _, block in made] == [((dtype,), dtype) for dtype in types]


@dataclass
class Holder:
    """Its text holds the values of its tensors."""

    held: Any


def test_neither_keys_nor_options_hold_values_of_tensors_or_addresses(device: Any) -> None:
    x = torch.full((3, 16), 123.0)
    described = TensorDescriptor.from_tensor(x, [1, 16])
    fn, record = plain, describe.kernel_record(plain)
    for value in (x, (x, x), [x], {"a": x}, Holder((x,)), described, Opaque(), np.full(3, 123.0), {Opaque()}):
        problem = describe.describe(fn, record, {"x": None, "option": (value,)}, (value, 8), (1,))
        text = json.dumps(problem.to_json())
        assert problem.key[1] == "8"
        assert "123" not in text
        assert " at 0x" not in text


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
def build_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Any]:
    """Write a module of this name and text, and import it."""
    made = iter(range(100))

    def load(name: str, text: str) -> Any:
        path = tmp_path / f"{name}_{next(made)}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def build(build_module: Callable[[str, str], Any]) -> Build:
    """Write the module with these values, import it, and return its kernel."""

    def build(helper: str = "helper_module", **values: Any) -> Any:
        given = {"above": "", "scale": 2, "other": 3, "n": 4, "factor": 5, "term": 6, **values}
        build_module(helper, HELPER.format(**given))
        text = SOURCE.replace("helper_module", helper).format(**given)
        return build_module("kernel_module", text).kernel

    return build


@pytest.mark.parametrize("change", [{"scale": 7}, {"factor": 7}, {"term": 7}])
@pytest.mark.parametrize("helper", ["helper_module", "triton_helpers_of_a_library"])
def test_what_the_kernel_uses_counts(build: Build, helper: str, change: dict[str, Any]) -> None:
    assert source_hash(build(helper)) != source_hash(build(helper, **change))


@pytest.mark.parametrize("change", [{"above": "# a comment\n\n"}, {"other": 7}, {"n": 7}])
def test_what_it_does_not_use_does_not(
    build: Build, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place in the file, other globals, and globals that share a name with its arguments or locals.

    One reading of a text serves all functions that have it: a decorator in a loop does not parse anew.
    """
    expected = source_hash(build())
    again = build(**change)
    monkeypatch.setattr(python_parser, "parse_module", lambda text: pytest.fail(f"parsed again: {text}"))
    assert source_hash(again) == expected


REWRITTEN = """
import triton, triton.language as tl
import helper_module as hm
SCALE = 2

@triton.jit
def inner(x):
    # five times
    return x * 5

@triton.jit(do_not_specialize=["n"])
def kernel(x, n: int, unused, BLOCK: tl.constexpr = 64):
    "Doubles."
    place: tl.tensor = tl.arange(0, BLOCK)
    doubled = (inner(tl.load(x + place,
                             mask=place < n))
               * SCALE)
    tl.store(x + place, hm.outer(doubled), mask=place < n)
"""


def test_the_normal_form_outlives_names_comments_and_annotations(
    build: Build, build_module: Callable[[str, str], Any]
) -> None:
    written = build()
    again = build_module("kernel_module", REWRITTEN)
    assert source_hash(again.kernel) != source_hash(written)
    assert normal_form_hash(again.kernel) == normal_form_hash(written)
    changed = build_module("kernel_module", REWRITTEN.replace("place < n", "place <= n"))
    assert normal_form_hash(changed.kernel) != normal_form_hash(again.kernel)


@pytest.mark.parametrize("change", [{"scale": 7}, {"factor": 7}, {"term": 7}])
def test_the_normal_form_changes_with_what_the_kernel_uses(build: Build, change: dict[str, Any]) -> None:
    assert normal_form_hash(build()) != normal_form_hash(build(**change))


NESTED = """
import enum, functools, types, dataclasses
import triton, triton.language as tl
import package_of_test.module as alias
import package_of_test
from package_of_test import module

class Sizes:
    BLOCK, OTHER = {attribute}, 1
class Shade(enum.Enum):
    DARK, LIGHT = {shade}, 2
@dataclasses.dataclass(frozen=True)
class Options:
    scale: float
    unused: object
OPTIONS = Options({option}, object())
TABLE = {{"a": (1, {{"b": {table}}})}}
TYPES = [tl.{type}]
SPACE = types.SimpleNamespace(size={space})

def made(factor):
    def by(x):
        return x * factor
    @triton.jit
    def scaled(x, first: tl.constexpr = factor):
        return x * factor + first
    return scaled, by
scaled, by = made({closure})
made_by = {{"f": scaled}}

@getattr(triton, "constexpr_function", triton.jit)
def rounded(x):
    return plain(x)

class Called:
    def __init__(self, factor):
        self.factor = factor * {made}
    def __call__(self, x):
        return x * self.factor + {call}
    @classmethod
    def method(cls, x):
        return x + {method}
@functools.cache
def cached(x):
    return x + {cached}
called, part = Called({object}), functools.partial(pow, {part})
@triton.autotune([triton.Config({{"N": {config}}})], [])
@triton.jit
def launched(x, N: tl.constexpr):
    tl.store(x, N)

def plain(x):
    return x + {plain} + called(Called.method(part(cached(launched[(x,)](x)))))

@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    column = tl.arange(0, Sizes.BLOCK) + Shade.DARK.value + TABLE["a"][1]["b"] + SPACE.size
    value = tl.load(x + column, mask=column < n).to(TYPES[0]) * OPTIONS.scale * alias.ALIAS
    value += package_of_test.module.NAME + module.inner.DEEP + rounded(1)
    tl.store(x + column, package_of_test.module.function(scaled(value)), mask=column < n)

@triton.jit
def short(x):
    value = tl.load(x)
    tl.store(x, package_of_test.module.function(value * package_of_test.module.NAME + Sizes.BLOCK))
"""
INNER = """
import types, triton
NAME, ALIAS, UNUSED = {name}, {alias}, {unused}
inner = types.SimpleNamespace(DEEP={deep})
@triton.jit
def function(x):
    return x * {function}
"""
NESTED_VALUES: dict[str, Any] = {
    **dict.fromkeys(("attribute", "shade", "option", "table", "space", "closure", "plain"), 8),
    **dict.fromkeys(("made", "call", "method", "cached", "object", "part", "config"), 8),
    **dict.fromkeys(("name", "alias", "deep", "function", "unused"), 4),
    "type": "float16",
}


@pytest.fixture
def nested(build_module: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The hash of a kernel whose constants and helpers lie in all places where Triton finds them."""

    def hash_with(**values: Any) -> str:
        given = {**NESTED_VALUES, **values}
        package, inner = (
            ModuleType("package_of_test"),
            build_module("package_of_test.module", INNER.format(**given)),
        )
        package.module = inner  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "package_of_test", package)
        return source_hash(build_module("nested_kernel", NESTED.format(**given)).kernel)

    return hash_with


def test_a_module_that_has_members_of_any_name_is_no_kernel() -> None:
    assert [innermost(m) for m in (torch.ops, torch.classes)] == [torch.ops, torch.classes]


@pytest.mark.parametrize("place", sorted(NESTED_VALUES.keys() - {"unused"}))
def test_a_constant_or_helper_of_any_depth_counts(nested: Callable[..., str], place: str) -> None:
    changed = nested(**{place: "bfloat16" if place == "type" else 5})
    assert nested() == nested(unused=5) != changed


def test_a_standalone_source_holds_what_lies_deep(nested: Callable[..., str]) -> None:
    """A variant is one module: constants and helpers of others become its own."""
    nested(name=7)
    kernel = sys.modules["nested_kernel"].short
    text = standalone_source(kernel)
    assert "package_of_test" not in text
    assert "NAME = triton.language.constexpr(7)" in text
    assert "value * NAME + BLOCK" in text
    assert "function(value" in text
    assert "def function(x)" in text


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


@pytest.mark.usefixtures("compiler")
def test_every_config_compiles_with_its_own_blocks() -> None:
    tuner = autotune(configs=tile_configs(), key=[], store=False, mode="exhaustive")(fresh(copy_tile))
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
