"""Which parameter an argument is, and which programs stand for a grid."""

from __future__ import annotations

import pytest

from forecast_autotune.features.ttir.parser import parse_ttir
from forecast_autotune.features.ttir.scalars import (
    PROGRAM_SAMPLES,
    Environment,
    bind_parameters,
    evaluate,
    mean,
    program_ids,
    trip_count,
)
from forecast_autotune.records import Argument


def bound(parameters: str, arguments: list[Argument]) -> Environment:
    """What the arguments bind in a kernel with these parameters."""
    text = f"module {{\n  tt.func public @k({parameters}) {{\n    tt.return\n  }}\n}}\n"
    return bind_parameters(parse_ttir(text)["k"], arguments)


def test_positions_skip_what_has_no_parameter() -> None:
    parameters = "%arg0: !tt.ptr<f16>, %arg1: i32, %arg2: f32, %arg3: i1, %arg4: i64"
    arguments = [
        Argument("one", "scalar", value=1),
        Argument("x", "tensor", "float16"),
        Argument("none", "none"),
        Argument("a", "scalar", value=7),
        Argument("BLOCK", "constexpr", value=64),
        Argument("f", "scalar", value=1.0),
        Argument("flag", "scalar", value=True),
        Argument("stride", "scalar", value=1),
        Argument("b", "scalar", value=9),
    ]
    assert bound(parameters, arguments) == {"%arg1": 7, "%arg3": 1, "%arg4": 9}


def test_an_unspecialised_one_keeps_its_parameter() -> None:
    parameters = "%arg0: i32, %arg1: i32"
    arguments = [Argument("a", "scalar", value=1), Argument("b", "scalar", value=5)]
    assert bound(parameters, arguments) == {"%arg0": 1, "%arg1": 5}


def test_a_descriptor_takes_its_shape_and_strides() -> None:
    parameters = "%arg0: !tt.tensordesc<8x8xf16>, %arg1: i32, %arg2: i32, %arg3: i64, %arg4: i64, %arg5: i32"
    arguments = [
        Argument("d", "tensor", "float16", (64, 32), (32, 1)),
        Argument("n", "scalar", value=5),
    ]
    result = bound(parameters, arguments)
    assert result == {"%arg1": 64, "%arg2": 32, "%arg3": 32, "%arg4": 1, "%arg5": 5}
    named = parameters.replace("%arg0", "%d").replace("%arg1", "%d.shape.0").replace("%arg3", "%d.stride.0")
    assert bound(named, arguments) == {"%d.shape.0": 64, "%d.stride.0": 32}


def test_arguments_that_do_not_fit_bind_nothing() -> None:
    assert bound("%arg0: !tt.ptr<f32>, %arg1: i32", [Argument("n", "scalar", value=5)]) == {}


@pytest.mark.parametrize("extent", [2, 3, 5, 8, 12, 64, 1000])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_sampled_programs_keep_the_mean(axis: int, extent: int) -> None:
    places = program_ids(axis, extent)
    assert isinstance(places, tuple)
    assert len(places) == PROGRAM_SAMPLES
    assert min(places) >= 0
    assert max(places) < extent
    assert mean(places) == (extent - 1) / 2


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("arith.addi %a, %b : i32", 5),
        ("arith.subi %b, %a : i32", -9),
        ("arith.muli %a, %b : i32", -14),
        ("arith.divsi %a, %b : i32", -3),
        ("arith.remsi %a, %b : i32", 1),
        ("arith.divsi %a, %zero : i32", None),
        ("arith.ceildivsi %a, %two : i32", 4),
        ("arith.minsi %a, %b : i32", -2),
        ("arith.maxsi %a, %b : i32", 7),
        ("arith.shli %a, %two : i32", 28),
        ("arith.shli %a, %b : i32", None),
        ("arith.andi %a, %two : i32", 2),
        ("arith.cmpi sle, %b, %a : i32", 1),
        ("arith.cmpi uge, %two, %a : i32", 0),
        ("arith.select %zero, %a, %b : i32", -2),
        ("arith.extsi %a : i32 to i64", 7),
        ("arith.addi %a, %unknown : i32", None),
        ("tt.splat %a : i32 -> tensor<4xi32>", 7),
        ("arith.constant dense<-3> : tensor<4xi32>", -3),
        ("arith.constant dense<[1, 2]> : tensor<2xi32>", None),
        ("arith.constant 3.000000e+00 : f32", None),
        ("arith.constant true", 1),
        ("tt.get_num_programs y : i32", 5),
        ("tt.get_program_id z : i32", 0),
        ("tt.load %p : !tt.ptr<i32>", None),
    ],
)
def test_operations_on_constants(line: str, expected: int | None) -> None:
    text = f"module {{\n  tt.func public @k() {{\n    %r = {line}\n    tt.return\n  }}\n}}\n"
    op = parse_ttir(text)["k"].blocks[0].ops[0]
    known: Environment = {"%a": 7, "%b": -2, "%two": 2, "%zero": 0}
    assert evaluate(op, known, (4, 5)) == expected


def test_trip_counts() -> None:
    assert trip_count(0, 10, 3) == 4
    assert trip_count(5, 5, 1) == 0
    assert trip_count(9, 5, 1) == 0
    assert trip_count(0, None, 1) is None
    assert trip_count(0, 2.5, 1) == 2.5  # a mean of whole trip counts stays a mean
    per_program = trip_count(0, program_ids(0, 8), 2)
    assert mean(per_program or 0) == (0 + 1 + 1 + 2 + 2 + 3 + 3 + 4) / 8
