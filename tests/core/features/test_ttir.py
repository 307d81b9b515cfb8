"""The TTIR parser and its counting, on literal text in both printed forms."""

from __future__ import annotations

import textwrap

import pytest

from forecast_autotune.features.ttir.extraction import (
    ASSUMED_EXTENT,
    DEFAULT_TRIPS,
    FeatureError,
    TtirFacts,
    extract_facts,
)
from forecast_autotune.features.ttir.parser import parse_ttir, parse_type, strip_locations
from forecast_autotune.features.ttir.scalars import (
    Environment,
    bind_parameters,
    evaluate,
)
from forecast_autotune.records import Argument

NAMED = """\
#loc = loc("/somewhere/k.py":5:1)
#loc2 = loc("x_ptr"(#loc))
module {
  tt.func public @k(%x_ptr: !tt.ptr<f16> {tt.divisibility = 16 : i32} loc("x_ptr"(#loc)), %n: i32 loc("n"(#loc)), %s: i32 {tt.divisibility = 16 : i32} loc("s"(#loc))) attributes {noinline = false} {
    %c-1_i32 = arith.constant -1 : i32 loc(#loc1)
    %c0_i32 = arith.constant 0 : i32 loc(#loc1)
    %c32_i32 = arith.constant 32 : i32 loc(#loc1)
    %acc = arith.constant dense<0.000000e+00> : tensor<16x32xf32> loc(callsite(#loc1 at #loc2))
    %m = tt.make_range {end = 16 : i32, start = 0 : i32} : tensor<16xi32> loc(#loc1)
    %k = tt.make_range {end = 32 : i32, start = 0 : i32} : tensor<32xi32> loc(#loc1)
    %p = tt.expand_dims %m {axis = 1 : i32} : tensor<16xi32> -> tensor<16x1xi32> loc(#loc1)
    %p_0 = tt.splat %s : i32 -> tensor<16x1xi32> loc(#loc1)
    %p_1 = arith.muli %p, %p_0 : tensor<16x1xi32> loc(#loc1)
    %p_2 = tt.splat %x_ptr : !tt.ptr<f16> -> tensor<16x1x!tt.ptr<f16>> loc(#loc1)
    %p_3 = tt.addptr %p_2, %p_1 : tensor<16x1x!tt.ptr<f16>>, tensor<16x1xi32> loc(#loc1)
    %p_4 = tt.broadcast %p_3 : tensor<16x1x!tt.ptr<f16>> -> tensor<16x32x!tt.ptr<f16>> loc(#loc1)
    %q = tt.expand_dims %k {axis = 0 : i32} : tensor<32xi32> -> tensor<1x32xi32> loc(#loc1)
    %q_5 = tt.broadcast %q : tensor<1x32xi32> -> tensor<16x32xi32> loc(#loc1)
    %p_6 = tt.addptr %p_4, %q_5 : tensor<16x32x!tt.ptr<f16>>, tensor<16x32xi32> loc(#loc1)
    %end = arith.addi %n, %c-1_i32 : i32 loc("end"(#loc1))
    %acc_7:2 = scf.for %i = %c0_i32 to %end step %c32_i32 iter_args(%acc_8 = %acc, %p_9 = %p_6) -> (tensor<16x32xf32>, tensor<16x32x!tt.ptr<f16>>)  : i32 {
      %v = tt.load %p_9 evictionPolicy = evict_last : tensor<16x32x!tt.ptr<f16>> loc(#loc1)
      %w = arith.extf %v : tensor<16x32xf16> to tensor<16x32xf32> loc(#loc1)
      %r = "tt.reduce"(%w) <{axis = 1 : i32}> ({
      ^bb0(%r_11: f32 loc(callsite(#loc1 at #loc2)), %r_12: f32 loc("b (c)"(#loc))):
        %r_13 = arith.addf %r_11, %r_12 : f32 loc(#loc1)
        tt.reduce.return %r_13 : f32 loc(#loc1)
      }) : (tensor<16x32xf32>) -> tensor<16xf32> loc(#loc1)
      %e = tt.expand_dims %r {axis = 1 : i32} : tensor<16xf32> -> tensor<16x1xf32> loc(#loc1)
      %e_14 = tt.broadcast %e : tensor<16x1xf32> -> tensor<16x32xf32> loc(#loc1)
      %y = arith.addf %acc_8, %e_14 : tensor<16x32xf32> loc(#loc1)
      %p_15 = tt.addptr %p_9, %q_5 : tensor<16x32x!tt.ptr<f16>>, tensor<16x32xi32> loc(#loc1)
      scf.yield %y, %p_15 : tensor<16x32xf32>, tensor<16x32x!tt.ptr<f16>> loc(#loc1)
    } {tt.num_stages = 3 : i32} loc(#loc9)
    tt.print " x {: %d" {hex = false, isSigned = array<i32: 0>} : %acc_7#0 : tensor<16x32xf32> loc(#loc1)
    %o = arith.truncf %acc_7#0 : tensor<16x32xf32> to tensor<16x32xf16> loc(#loc1)
    tt.store %p_6, %o : tensor<16x32x!tt.ptr<f16>> loc(#loc1)
    tt.return loc(#loc)
  } loc(#loc)
} loc(#loc)
#loc1 = loc(unknown)
#loc9 = loc("acc"(#loc2))
"""  # noqa: E501

ARGUMENTS = [
    Argument("x_ptr", "tensor", "float16", (16, 4096), (4096, 1), True),
    Argument("one", "scalar", "i32", value=1),
    Argument("n", "scalar", "i32", value=129),
    Argument("bias", "none"),
    Argument("s", "scalar", "i32", value=4096),
    Argument("BLOCK", "constexpr", value=32),
]


def unnamed(text: str) -> str:
    """The `%arg0` form of `NAMED`, as another printer would write it."""
    for name, position in (("x_ptr", 0), ("n", 1), ("s", 2), ("i", 3), ("acc_8", 4), ("p_9", 5)):
        text = text.replace(f"%{name} ", f"%arg{position} ").replace(f"%{name},", f"%arg{position},")
        text = text.replace(f"%{name}:", f"%arg{position}:").replace(f"%{name}\n", f"%arg{position}\n")
    return strip_locations(text)


def kernel(body: str, parameters: str = "%arg0: !tt.ptr<f32>, %arg1: i32", more: str = "") -> str:
    inner = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    return (
        f"module {{\n  tt.func public @k({parameters}) attributes {{noinline = false}} {{\n"
        f"{inner}\n    tt.return\n  }}\n{more}}}\n"
    )


def count(
    body: str, n: int | None = 10, grid: tuple[int, ...] | None = (8, 1, 1), more: str = ""
) -> TtirFacts:
    """Facts of a kernel `(x: tensor, n: int)`."""
    arguments = [Argument("x", "tensor", "float32"), Argument("n", "scalar", "i32", value=n)]
    return extract_facts(kernel(body, more=more), arguments, grid)


def test_both_printed_forms_give_the_same_facts() -> None:
    named = extract_facts(NAMED, ARGUMENTS, (4, 1, 1))
    assert "loc" not in unnamed(NAMED)
    assert "%x_ptr" not in unnamed(NAMED)
    assert extract_facts(unnamed(NAMED), ARGUMENTS, (4, 1, 1)) == named
    assert extract_facts(strip_locations(NAMED), ARGUMENTS, (4, 1, 1)) == named


def test_numbers_of_the_literal_module() -> None:
    got = extract_facts(NAMED, ARGUMENTS, (4, 1, 1))
    assert got.loop_trips == 4  # ceil((129 + -1) / 32): the constant's name is `%c-1_i32`
    assert got.load_bytes == 4 * 16 * 32 * 2
    assert got.store_bytes == 16 * 32 * 2
    assert got.reduce_elements == 4 * 16 * 32
    assert got.elementwise == (4 * 2 + 1) * 16 * 32  # extf, addf; truncf. Not the reduction's body
    assert got.mean_contiguous == 32
    assert got.accumulator_bytes == 4 * 16 * 32
    assert got.serial_chain == 2
    assert got.masked_share == 0
    assert got.unknown_trips == 0


@pytest.mark.parametrize(
    "text",
    [
        "!tt.tensordesc<128x64xf16>",
        "!tt.tensordesc<tensor<128x64xf16>>",
        "!tt.ptr<tensor<128x64xf16>>",
        "<128x64xf16>",
        "<tensor<128x64xf16>>",
    ],
)
def test_descriptors_and_block_pointers_load_their_block(text: str) -> None:
    result = parse_type(text)
    assert result.kind == "block"
    assert result.loaded_type() == parse_type("tensor<128x64xf16>")


LOAD = "%l = tt.load %arg0 : !tt.ptr<f32>"


def test_loops_nest_and_inner_bounds_take_their_mean() -> None:
    got = count(
        f"""
        %c0 = arith.constant 0 : i32
        %c1 = arith.constant 1 : i32
        scf.for %i = %c0 to %arg1 step %c1  : i32 {{
          scf.for %j = %i to %arg1 step %c1  : i32 {{
            {LOAD}
          }}
        }}
        """
    )
    assert got.load_ops == 55  # 10 + 9 + ... + 1
    assert (got.loop_depth, got.loop_trips, got.iterations) == (2, 55, 55)


@pytest.mark.parametrize(
    ("bound", "trips"),
    [
        ("arith.addi %arg1, %c1 : i32", DEFAULT_TRIPS),  # an argument without a value
        ("tt.load %arg0 : !tt.ptr<i32>", ASSUMED_EXTENT / 4),
    ],
)
def test_unknown_bounds_are_assumed_and_counted(bound: str, trips: float) -> None:
    body = f"""
        %c0 = arith.constant 0 : i32
        %c1 = arith.constant 1 : i32
        %c4 = arith.constant 4 : i32
        %e = {bound}
        scf.for %i = %c0 to %e step %c4  : i32 {{
          {LOAD}
        }}
        %w = scf.while (%a = %c0) : (i32) -> i32 {{
          %t = arith.cmpi slt, %a, %e : i32
          scf.condition(%t) %a : i32
        }} do {{
        ^bb0(%a: i32):
          {LOAD}
          %b = arith.addi %a, %c4 : i32
          scf.yield %b : i32
        }}
        """
    got = count(body, n=None)
    assert got.unknown_trips == 2
    assert got.load_ops == 2 * trips + bound.startswith("tt.load")
    assert got.loop_depth == 1


def test_a_loop_variable_is_forgotten_before_the_next_loop_of_that_name() -> None:
    body = f"""
        %c0 = arith.constant 0 : i32
        %c1 = arith.constant 1 : i32
        %c9 = arith.constant 9 : i32
        scf.for %i = %c0 to %c9 step %c1  : i32 {{
          {LOAD}
        }}
        scf.for %i = %c0 to %arg1 step %c1  : i32 {{
          scf.for %j = %c0 to %i step %c1  : i32 {{
            {LOAD}
          }}
        }}
        """
    got = count(body, n=None)
    assert got.unknown_trips == 2
    assert got.load_ops == 9 + DEFAULT_TRIPS**2


@pytest.mark.parametrize(
    ("condition", "then", "otherwise"),
    [
        ("arith.cmpi sgt, %arg1, %c5 : i32", 1.0, 0.0),
        ("arith.cmpi slt, %arg1, %c5 : i32", 0.0, 1.0),
        ("arith.cmpi slt, %pid, %c5 : i32", 5 / 8, 3 / 8),
        ("tt.load %arg0 : !tt.ptr<i1>", 0.5, 0.5),
    ],
)
def test_branches(condition: str, then: float, otherwise: float) -> None:
    got = count(
        f"""
        %c5 = arith.constant 5 : i32
        %pid = tt.get_program_id x : i32
        %z = arith.constant dense<1.000000e+00> : tensor<64xf32>
        %t = {condition}
        %r = scf.if %t -> (tensor<64xf32>) {{
          %a = math.exp %z : tensor<64xf32>
          scf.yield %a : tensor<64xf32>
        }} else {{
          %a = arith.addf %z, %z : tensor<64xf32>
          scf.yield %a : tensor<64xf32>
        }}
        """
    )
    assert got.special == 64 * then
    assert got.elementwise == 64 * otherwise


@pytest.mark.parametrize(
    ("condition", "share"),
    [("arith.cmpi sge, %pid, %c6 : i32", 0.75), ("tt.load %arg0 : !tt.ptr<i1>", 1.0)],
)
def test_early_return_is_followed(condition: str, share: float) -> None:
    got = count(
        f"""
        %c6 = arith.constant 6 : i32
        %z = arith.constant dense<1.000000e+00> : tensor<64xf32>
        %pid = tt.get_program_id x : i32
        %t = {condition}
        cf.cond_br %t, ^bb1, ^bb2
        ^bb1:  // pred: ^bb0
        tt.return
        ^bb2:  // pred: ^bb0
        %a = math.exp %z : tensor<64xf32>
        """
    )
    assert got.special == 64 * share


def test_calls_multiply_the_callee_into_the_caller() -> None:
    helper = """\
  tt.func private @"m.<locals>.helper__i32"(%arg0: i32) -> i32 attributes {noinline = true} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %z = arith.constant dense<1.000000e+00> : tensor<32xf32>
    scf.for %i = %c0 to %arg0 step %c1  : i32 {
      %e = math.log %z : tensor<32xf32>
    }
    %0 = arith.addi %arg0, %c1 : i32
    tt.return %0 : i32
  }
"""
    body = """
        %c0 = arith.constant 0 : i32
        %c3 = arith.constant 3 : i32
        %h = tt.call @"m.<locals>.helper__i32"(%c3) : (i32) -> i32
        scf.for %i = %c0 to %h step %c3  : i32 {
          %g = tt.call @"m.<locals>.helper__i32"(%c3) : (i32) -> i32
        }
        tt.call @elsewhere() : () -> ()
        """
    got = count(body, more=helper)
    assert got.special == 32 * 3 * (1 + 2)  # the loop runs ceil((3 + 1) / 3) times
    assert got.unknown_trips == 0


def test_memory_operations_of_other_kinds() -> None:
    got = count(
        """
        %c0 = arith.constant 0 : i32
        %i = tt.make_range {end = 64 : i32, start = 0 : i32} : tensor<64xi32>
        %d = tt.make_tensor_descriptor %arg0, [%arg1, %arg1], [%s, %s] : <f32>, <tensor<16x64xf32>>
        %a = tt.descriptor_load %d[%c0, %c0] : !tt.tensordesc<tensor<16x64xf32>> -> tensor<16x64xf32>
        tt.descriptor_store %d[%c0, %c0], %a : !tt.tensordesc<tensor<16x64xf32>>, tensor<16x64xf32>
        tt.descriptor_reduce add, %d[%c0, %c0], %a : !tt.tensordesc<16x64xf32>, tensor<16x64xf32>
        %p = tt.make_tensor_ptr %arg0, [%s], [%s], [%c0] {order = array<i32: 1, 0>} : <tensor<16x32xf16>>
        %q = tt.advance %p, [%c0, %c0] : <tensor<16x32xf16>>
        %b = tt.load %q {boundaryCheck = array<i32: 0, 1>, padding = 1 : i32} : !tt.ptr<tensor<16x32xf16>>
        tt.store %q, %b {boundaryCheck = array<i32: 0>} : !tt.ptr<tensor<16x32xf16>>
        %h = tt.histogram %i : tensor<64xi32> -> tensor<128xi32>
        %g = tt.gather %a[%j] {axis = 0 : i32} : (tensor<16x64xf32>, tensor<8x64xi32>) -> tensor<8x64xf32>
        %o = tt.atomic_cas acq_rel, gpu, %arg0, %c0, %c0 : (!tt.ptr<i32>, i32, i32) -> i32
        """
    )
    blocks, pointers = 16 * 64 * 4, 16 * 32 * 2
    assert got.load_bytes == got.store_bytes == blocks + pointers
    assert got.masked_share == pointers / (blocks + pointers)
    assert got.mean_contiguous == pytest.approx((64 * blocks + 32 * pointers) / (blocks + pointers))
    assert got.atomic_elements == 16 * 64 + 1
    assert got.reduce_elements == 64
    assert got.conversions == 16 * 64


def test_scaled_dot_counts_packed_operands_unpacked() -> None:
    got = count(
        "%r = tt.dot_scaled %a scale %b, %c scale %d, %e lhs = e2m1 rhs = e2m1 {fastMath = false} : "
        "tensor<128x32xi8>, tensor<128x2xi8> * tensor<32x64xi8>, tensor<64x2xi8> -> tensor<128x64xf32>"
    )
    assert got.dot_shapes == ((128, 64, 64, 1.0),)
    assert got.dot_flops == 2 * 128 * 64 * 64
    assert got.dot_input_bits == 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        "module {\n}\n",
        "module {\n  tt.func public @k() {\n    tt.return\n",
        "}\n",
        NAMED[:-900],
        kernel("?? nonsense"),
    ],
)
def test_text_that_is_no_module_is_refused(text: str) -> None:
    with pytest.raises(FeatureError, match="not a line of Triton IR" if "??" in text else ""):
        extract_facts(text, [], None)


# --- which parameter an argument is, and which programs stand for a grid ---


def bound(parameters: str, arguments: list[Argument]) -> Environment:
    """What the arguments bind in a kernel with these parameters."""
    text = f"module {{\n  tt.func public @k({parameters}) {{\n    tt.return\n  }}\n}}\n"
    return bind_parameters(parse_ttir(text)["k"], arguments)


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
