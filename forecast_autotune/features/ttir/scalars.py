"""Constant propagation over the scalar integers of a TTIR function.

A value is a plain number when every program computes the same one, and a tuple of `PROGRAM_SAMPLES` numbers
when it depends on the program id: one per sampled program. The samples lie symmetrically in the
grid, so whatever is linear in a program id keeps its exact mean, and a loop bound that a causal mask
makes different for every program contributes its mean trip count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    from forecast_autotune.features.ttir.parser import Block, Op, TtirFunction, Type
    from forecast_autotune.records import Argument

PROGRAM_SAMPLES = 8
Value: TypeAlias = float | tuple[float, ...]
"""One number for all programs, or one per sampled program. Integers stay integers."""
Environment: TypeAlias = dict[str, Value]

# Another order of the samples per axis: programs on a diagonal of the grid would tie the axes together.
_SAMPLE_ORDERS = (
    (0, 1, 2, 3, 4, 5, 6, 7),
    (2, 5, 0, 7, 3, 6, 1, 4),
    (5, 0, 6, 3, 1, 4, 7, 2),
    (0, 3, 6, 7, 5, 1, 4, 2),
)
ITERATION_AXIS = 3
"""An axis of `program_ids` besides those of the grid: iterations of a loop that encloses another."""
ROWS_SUFFIX, SIZE_SUFFIX = ".rows", ".size"
"""After a pointer parameter's name: the first dimension of its tensor, among what `bind_parameters` gives."""
_UNNAMED = re.compile(r"%arg\d+")


_Fact = TypeVar("_Fact")


def lift(function: Callable[..., float], *values: Value) -> Value:
    """Apply a function per sampled program; stays one number when all values are one number."""
    if not any(isinstance(value, tuple) for value in values):
        return function(*values)
    columns = [value if isinstance(value, tuple) else (value,) * PROGRAM_SAMPLES for value in values]
    return tuple(function(*column) for column in zip(*columns, strict=True))


def mean(value: Value) -> float:
    """Mean over programs."""
    return sum(value) / len(value) if isinstance(value, tuple) else float(value)


def program_ids(axis: int, extent: int) -> Value:
    """Program ids along one grid axis, one per sample: evenly spread and symmetric around the middle."""
    if extent <= 1:
        return 0
    low = [int((place + 0.5) * extent / PROGRAM_SAMPLES) for place in range(PROGRAM_SAMPLES // 2)]
    places = low + [extent - 1 - n for n in reversed(low)]
    return tuple(places[n] for n in _SAMPLE_ORDERS[axis])


def _quotient(a: float, b: float) -> float:
    """C division for integers; means of integers (fractions) are floored."""
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return math.floor(a / b)


def _ceiling(a: float, b: float) -> float:
    return -(-a // b) if isinstance(a, int) and isinstance(b, int) else math.ceil(a / b)


def _bits(function: Callable[[int, int], int]) -> Callable[[float, float], float]:
    return lambda a, b: function(int(a), int(b))


_BINARY: dict[str, Callable[[float, float], float]] = {
    "addi": lambda a, b: a + b,
    "subi": lambda a, b: a - b,
    "muli": lambda a, b: a * b,
    "divsi": _quotient,
    "divui": _quotient,
    "floordivsi": lambda a, b: a // b,
    "ceildivsi": _ceiling,
    "ceildivui": _ceiling,
    "remsi": lambda a, b: a - b * _quotient(a, b),
    "remui": lambda a, b: a - b * _quotient(a, b),
    "minsi": min,
    "minui": min,
    "maxsi": max,
    "maxui": max,
    "andi": _bits(lambda a, b: a & b),
    "ori": _bits(lambda a, b: a | b),
    "xori": _bits(lambda a, b: a ^ b),
    "shli": _bits(lambda a, b: a << min(b, 63)),
    "shrsi": _bits(lambda a, b: a >> b),
    "shrui": _bits(lambda a, b: a >> b),
}
_COMPARE: dict[str, Callable[[float, float], float]] = {
    "eq": lambda a, b: int(a == b),
    "ne": lambda a, b: int(a != b),
    "lt": lambda a, b: int(a < b),
    "le": lambda a, b: int(a <= b),
    "gt": lambda a, b: int(a > b),
    "ge": lambda a, b: int(a >= b),
}
_IDENTITY_OPS = frozenset(
    (
        *("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast", "arith.index_castui"),
        *("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.unsplat"),
    )
)
_CONSTANT = re.compile(r"(?:dense<)?(-?\d+|true|false)>?\s*$")


def evaluate(op: Op, known: Mapping[str, Value], grid: Sequence[int] | None) -> Value | None:
    """The integer an operation computes, or None. A tensor whose elements are all equal counts too."""
    name = op.name
    if name == "arith.constant":
        match = _CONSTANT.search(op.text)
        if match is None or op.outputs[0].kind != "int":
            return None
        digits = match.group(1)
        return int(digits == "true") if digits in ("true", "false") else int(digits)
    if name in ("tt.get_program_id", "tt.get_num_programs"):
        axis = "xyz".find(op.text.strip()[:1])
        if grid is None or axis < 0:
            return None
        extent = int(grid[axis]) if axis < len(grid) else 1
        return extent if name == "tt.get_num_programs" else program_ids(axis, extent)
    if name in _IDENTITY_OPS:
        return known.get(op.operands[0])
    values = [known.get(operand) for operand in op.operands]
    if any(value is None for value in values) or not name.startswith("arith."):
        return None
    numbers = [value for value in values if value is not None]
    short = name[6:]
    try:
        if short in _BINARY and len(numbers) == 2:
            return lift(_BINARY[short], *numbers)
        if short == "cmpi":
            return lift(_COMPARE[predicate(op)], *numbers)
        if short == "select":
            return lift(lambda condition, a, b: a if condition else b, *numbers)
    except (ArithmeticError, ValueError, KeyError):
        # Division by zero in one sample, a negative shift: the value is unknown.
        return None
    return None


def predicate(op: Op) -> str:
    """The comparison of an `arith.cmpi`, without the sign: `lt`, `ge`, `eq`, ..."""
    return op.text.split(",")[0].strip()[-2:]


def trip_count(lower: Value | None, upper: Value | None, step: Value | None) -> Value | None:
    """Iterations of a loop; a bound that is already a mean is not rounded up again. None when unknown."""
    if lower is None or upper is None or step is None:
        return None

    def count(start: float, stop: float, stride: float) -> float:
        if stride <= 0:
            return 0
        if all(float(n).is_integer() for n in (start, stop, stride)):
            return max(0, _ceiling(int(stop - start), int(stride)))
        return max(0.0, (stop - start) / stride)

    return lift(count, lower, upper, step)


def while_counter(before: Block, after: Block) -> tuple[str, str, str] | None:
    """(counter, end, step) of a `while counter < end` loop whose body adds `step`; None for any other.

    `before` holds the condition, `after` the body. The counter is named as in `before`, where its
    value is the one it starts from.
    """
    if not before.ops or not after.ops or not before.ops[-1].operands:
        return None
    condition, *args = before.ops[-1].operands
    comparison = next((op for op in before.ops if condition in op.results), None)
    if comparison is None or comparison.name != "arith.cmpi" or len(comparison.operands) != 2:
        return None
    name, end = comparison.operands
    if name not in before.arguments or predicate(comparison) not in ("lt", "le", "ne"):
        return None
    place = before.arguments.index(name)
    results = after.ops[-1].operands
    inner = [b for b, arg in zip(after.arguments, args, strict=False) if arg == name]
    maker = next((op for op in after.ops if place < len(results) and results[place] in op.results), None)
    if maker is None or maker.name != "arith.addi" or not inner:
        return None
    steps = [operand for operand in maker.operands if operand not in inner]
    return (name, end, steps[0]) if len(steps) == 1 else None


def bind_call(facts: Mapping[str, _Fact], names: Mapping[str, str]) -> dict[str, _Fact]:
    """The known values of a call's operands, by the names that the callee has for them."""
    return {to: facts[by] for to, by in names.items() if by in facts}


def bind_parameters(function: TtirFunction, arguments: Sequence[Argument]) -> Environment:
    """Values of a kernel's integer parameters, by SSA name.

    Parameters are matched by name; in the `%arg0` form by position, where constexpr and None
    arguments and (usually) integers equal to 1 have no parameter, and a tensor descriptor has
    several. Nothing is bound when the positions do not fit.
    """
    block = function.blocks[0]
    if any(_UNNAMED.fullmatch(name) is None for name in block.arguments):
        return _by_name(block.arguments, arguments)
    present = [a for a in arguments if a.kind not in ("constexpr", "none")]
    return _by_position(block.arguments, block.types, present)


def _by_name(names: Sequence[str], arguments: Sequence[Argument]) -> Environment:
    bound: Environment = {}
    for argument in arguments:
        name = f"%{argument.name}"
        if isinstance(argument.value, int):
            bound[name] = int(argument.value)
        for part, sizes in (("shape", argument.shape), ("stride", argument.stride)):
            bound |= {f"{name}.{part}.{place}": size for place, size in enumerate(sizes)}
        if argument.shape and f"{name}.shape.0" not in names:
            bound |= _pointer_extents(name, argument)
    names_in_order = [whole + part for whole in names for part in ("", ROWS_SUFFIX, SIZE_SUFFIX)]
    return {name: bound[name] for name in names_in_order if name in bound}


def _pointer_extents(name: str, argument: Argument) -> Environment:
    """The names bound beside a pointer: the first dimension and the elements of the tensor it points at."""
    return {f"{name}{ROWS_SUFFIX}": argument.shape[0], f"{name}{SIZE_SUFFIX}": math.prod(argument.shape)}


def _by_position(names: Sequence[str], types: Sequence[Type], arguments: Sequence[Argument]) -> Environment:
    """Align parameters and arguments by kind; the first alignment that uses up both wins."""
    dead: set[tuple[int, int]] = set()

    def align(place: int, index: int) -> Environment | None:
        if index == len(arguments):
            return {} if place == len(names) else None
        if (place, index) in dead:
            return None
        argument = arguments[index]
        for count, bound in _parameter_matches(argument, names[place:], types[place:]):
            remainder = align(place + count, index + 1)
            if remainder is not None:
                return {**bound, **remainder}
        dead.add((place, index))
        return None

    return align(0, 0) or {}


def _parameter_matches(
    argument: Argument, names: Sequence[str], types: Sequence[Type]
) -> list[tuple[int, Environment]]:
    """The possible bindings of one argument: (number of parameters, their values)."""
    value = argument.value
    ways: list[tuple[int, Environment]] = []
    if value == 1 and not isinstance(value, bool | float):
        ways.append((0, {}))
    if not types:
        return ways
    kind = types[0].kind
    if argument.kind == "tensor":
        if kind == "block":
            sizes = (*argument.shape, *argument.stride)
            if len(types) > len(sizes) and all(t.kind == "int" for t in types[1 : len(sizes) + 1]):
                ways.append((len(sizes) + 1, dict(zip(names[1:], sizes, strict=False))))
        if kind in ("block", "pointer"):
            ways.append((1, _pointer_extents(names[0], argument) if argument.shape else {}))
    elif isinstance(value, int) and kind == "int":
        ways.append((1, {names[0]: int(value)}))
    elif not isinstance(value, int):
        ways.append((1, {}))
    return ways
