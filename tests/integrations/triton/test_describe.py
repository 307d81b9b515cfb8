"""A large list of configs becomes candidates and launch grids without looking at each of them twice."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl

from forecast_autotune.records import Argument, Config, Problem, digest
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.rebuilt_call import RebuildError, rebuilt_arguments


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


def test_a_grid_that_cannot_say_is_not_asked_again() -> None:
    assert asked(plain, lambda meta: (meta["unknown"],)) == (2, {})


def test_where_launch_options_are_parameters_each_candidate_is_asked() -> None:
    calls, found = asked(with_warps, lambda meta: (meta["num_warps"],))
    assert calls == 6
    assert found["BLOCK=16 warps=2 stages=3"] == (2,)


def test_heuristics_may_read_launch_options() -> None:
    rule = triton.heuristics({"n": lambda args: 128 * args["num_warps"]})(plain)
    calls, found = asked(rule)
    assert calls == 6
    assert found["BLOCK=16 warps=4 stages=3"] == (32,)


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
