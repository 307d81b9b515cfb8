"""The integers of one walk through a TTIR function: what is known, what is guessed, how often loops run.

A value is known when constants, arguments and program ids decide it. Values that the kernel loads, or a loop carries
from one iteration to the next, are guessed: good enough for a trip count, never used
for anything else.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, field

from forecast_autotune.features.ttir import coalescing, tensors
from forecast_autotune.features.ttir.parser import Block, Op, TtirFunction
from forecast_autotune.features.ttir.scalars import (
    ITERATION_AXIS,
    ROWS_SUFFIX,
    SIZE_SUFFIX,
    Environment,
    Value,
    evaluate,
    lift,
    mean,
    predicate,
    program_ids,
    trip_count,
    while_counter,
)

ASSUMED_EXTENT = 1024
"""Assumed for an integer that the kernel loads: larger steps then take fewer iterations, as they should."""


_MASK_PRESERVING_OPS = frozenset(("arith.andi", "tt.broadcast", "tt.expand_dims"))
"""Operations that make a mask of masks without switching lanes on."""
_TRACED = frozenset(
    (
        *("tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.load", "tt.reduce"),
        *("arith.subi", "arith.extsi", "arith.extui"),
    )
)


@dataclass(kw_only=True)
class IntegerAnalysis:
    """Integers and strides by SSA name, as the walk has met them so far."""

    grid: tuple[int, ...] | None
    values: Environment = field(default_factory=dict)
    strides: dict[str, tensors.Strides] = field(default_factory=dict)
    starts: Environment = field(default_factory=dict)
    """First elements of tensors of integers, where those are known and the others differ."""
    active: Environment = field(default_factory=dict)
    """For masks: the share of elements that is true."""
    guesses: Environment = field(default_factory=dict)
    """Integers of the usual program and the first iteration, where data or earlier iterations decide them."""
    divisors: dict[str, int] = field(default_factory=dict)
    """Powers of two that divide integers and pointers, see `coalescing.divisor`."""
    rows: dict[str, int] = field(default_factory=dict)
    """First dimensions of the tensors that pointer parameters point at, by parameter."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Elements of those tensors."""
    sources: dict[str, str] = field(default_factory=dict)
    """The pointer parameter from which a pointer or a loaded integer comes."""
    undecided: dict[str, frozenset[str]] = field(default_factory=dict)
    """The loads that each guess rests on."""

    def bind_parameters(self, function: TtirFunction, bound: Environment) -> None:
        """Take the values of a kernel's parameters from `bound`.

        Where the text states no divisor of any parameter, pointers count as aligned, and integers by their values.
        """
        block = function.blocks[0]
        for name, type_ in zip(block.arguments, block.types, strict=False):
            if (value := bound.get(name)) is not None:
                self.values[name] = value
            if isinstance(rows := bound.get(name + ROWS_SUFFIX), int):
                self.rows[name], self.sources[name] = rows, name
            if isinstance(size := bound.get(name + SIZE_SUFFIX), int):
                self.sizes[name] = size
            if function.divisors:
                self.divisors[name] = function.divisors.get(name, 1)
            else:
                even = isinstance(value, int) and value % coalescing.ALIGNMENT == 0
                self.divisors[name] = coalescing.ALIGNMENT if even or type_.kind == "pointer" else 1

    def align(self, op: Op, body: Block, carried: Sequence[str]) -> None:
        """Set the divisors of an `scf.for`'s variable and of its carried values, before its body is walked."""
        self.divisors[body.arguments[0]] = min(self.divisors.get(name, 1) for name in op.operands[::2])
        for name, last in zip(carried, body.ops[-1].operands, strict=False):
            if name in self.divisors:
                growth = coalescing.loop_growth_divisor(
                    name, last, body, self.divisors, self.strides, self.values
                )
                self.divisors[name] = min(self.divisors[name], growth)

    def forget(self, name: str) -> None:
        """Drop all facts of a name: sibling regions use the same names again."""
        self.values.pop(name, None)
        self.strides.pop(name, None)
        self.divisors.pop(name, None)
        self.sources.pop(name, None)
        self.starts.pop(name, None)
        self.active.pop(name, None)
        if self.guesses:
            self.guesses.pop(name, None)
            self.undecided.pop(name, None)

    def propagate(self, op: Op) -> None:
        """Work out the result of an operation with one integer or pointer result."""
        if op.name in _TRACED and op.operands and (source := self.sources.get(op.operands[0])) is not None:
            self.sources[op.results[0]] = source
        if (value := evaluate(op, self.values, self.grid)) is not None:
            self.values[op.results[0]] = value
        elif not op.outputs[0].tensor:
            self._propagate_guess(op)
        if op.outputs[0].tensor:
            self._propagate_start(op)
            if op.name == "arith.cmpi":
                self.strides[op.results[0]] = coalescing.comparison_strides(op, self.divisors, self.strides)
            else:
                self.strides[op.results[0]] = tensors.result_strides(op, self.strides, self.values)
        self.divisors[op.results[0]] = coalescing.divisor(op, self.divisors, self.strides, self.values)

    def _propagate_start(self, op: Op) -> None:
        """Work out the first element of a tensor of different integers, or the active share of a mask."""
        name = op.results[0]
        start: Value | None
        if op.name == "tt.make_range":
            if (start := coalescing.range_start(op)) is not None:
                self.starts[name] = start
        elif op.outputs[0].bits == 1:
            if (share := self._mask_share(op)) is not None:
                self.active[name] = share
        elif name not in self.values and any(operand in self.starts for operand in op.operands):
            values = {n: v for n in op.operands if (v := self.starts.get(n, self.values.get(n))) is not None}
            start = evaluate(op, values, self.grid) if len(values) == len(op.operands) else None
            if start is not None:
                self.starts[name] = start

    def _mask_share(self, op: Op) -> Value | None:
        if (value := self.values.get(op.results[0])) is not None:
            return value
        if op.name == "arith.cmpi":
            return self._share_below(op)
        shares = [self.active[operand] for operand in op.operands if operand in self.active]
        if op.name == "arith.andi" and len(shares) > 1:
            return lift(lambda a, b: a * b, *shares)
        return shares[0] if shares and op.name in _MASK_PRESERVING_OPS else None

    def _share_below(self, op: Op) -> Value | None:
        """The share of `first + step * i`, along one dimension, that is less than a limit."""
        left, right = op.operands
        limit, first = self.values.get(right), self.starts.get(left)
        if limit is None or first is None or predicate(op) != "lt":
            return None
        strides = zip(self.strides.get(left, ()), op.inputs[0].shape, strict=False)
        moving = [(step, size) for (step, _), size in strides if step != 0]
        if len(moving) != 1 or not moving[0][0] or moving[0][0] < 0:
            return None
        step, size = moving[0]
        return lift(lambda a, b: min(1.0, max(0.0, math.ceil((b - a) / step) / size)), first, limit)

    def _propagate_guess(self, op: Op) -> None:
        """Guess an integer that depends on data: a loaded one is an extent, others follow from it."""
        name = op.results[0]
        if op.name in tensors.LOADS or op.name == "tt.reduce":
            self.guesses[name] = (
                self._offset_gap(op.operands[0]) if op.name == "tt.reduce" else ASSUMED_EXTENT
            )
            self.undecided[name] = frozenset((name,))
            return
        if not any(operand in self.guesses for operand in op.operands):
            return
        value = evaluate(op, ChainMap(self.values, self.guesses), self.grid)
        origins = [self.undecided[operand] for operand in op.operands if operand in self.undecided]
        if op.name == "arith.subi" and len(origins) == 2 and not origins[0] & origins[1]:
            value = self._offset_gap(op.operands[0])  # `end - start`
        if value is not None:
            self.guesses[name] = value
            if origins:
                self.undecided[name] = frozenset().union(*origins)

    def _offset_gap(self, name: str) -> float:
        """The step between neighbouring offsets, one of which is `name`: equal parts of the rows of a tensor.

        The tensor is the one with most rows, except that of the offsets, which are one more than the parts. A usual
        extent where the offsets' tensor is unknown, or no other has that many rows.
        """
        source = self.sources.get(name, "")
        parts = self.rows.get(source, 0) - 1
        most = max((rows for key, rows in self.rows.items() if key != source), default=0)
        return round(most / parts) if 0 < parts <= most else ASSUMED_EXTENT

    def assume_initial(self, name: str, init: str) -> None:
        """Take the facts of a carried value from its initial one: they hold at least in the first iteration."""
        if init in self.strides:
            # Pointers are advanced by equal amounts in all elements, so runs stay runs.
            self.strides[name] = self.strides[init]
        if init in self.divisors:
            self.divisors[name] = self.divisors[init]
        if (start := self._value_or_guess(init)) is not None:
            self.guesses[name] = start
            if init in self.undecided:
                self.undecided[name] = self.undecided[init]

    def for_trips(self, op: Op, body: Block) -> tuple[Value, bool] | None:
        """(iterations, whether no data decide them)."""
        lower, upper, step = (self._value_or_guess(name) for name in op.operands)
        count = trip_count(lower, upper, step)
        if count is None or lower is None or step is None:
            return None
        certain = self.undecided.keys().isdisjoint(op.operands)
        if all(name in self.values for name in op.operands):
            self.values[body.arguments[0]] = _iteration_values(lower, step, count, body)
        elif not certain and mean(count) <= 0:
            start, end = (self.undecided.get(name, frozenset()) for name in op.operands[:2])
            # Bounds from two loads are neighbouring offsets; bounds from one and the same, the rest of a division.
            count = 1 if start & end else trip_count(0, self._offset_gap(op.operands[1]), step) or 1
        return count, certain

    def while_trips(self, op: Op) -> tuple[Value, bool] | None:
        """The same for `while a < end: ...; a += step`, if the loop is of that kind."""
        before, after = op.regions[0][0], op.regions[-1][0]
        names = while_counter(before, after)
        if names is None:
            return None
        self._evaluate_ahead(before)
        start, stop = (self._value_or_guess(name) for name in names[:2])
        certain = self.undecided.keys().isdisjoint(names[:2])
        if isinstance(start, tuple) and op.inits[before.arguments.index(names[0])] not in self.values:
            # The counter continues from the last round of an outer loop, at any value: on average, the first one.
            first, second, *_ = sorted(start)
            start = first - (second - first) / 2  # samples lie in the middle of equal shares of the grid
        for name, init in zip(after.arguments, before.ops[-1].operands[1:], strict=False):
            if name != init:
                self.forget(name)
                self.assume_initial(name, init)
        self._evaluate_ahead(after)
        step = self._value_or_guess(names[2])
        if start is None or stop is None or step is None:
            return None
        # The step may be that of the first iteration only (to the end of a tile, say): no rounding up.
        count = lift(lambda a, b, by: max(0.0, (b - a) / by) if by > 0 else 0.0, start, stop, step)
        return count, certain and names[2] not in self.undecided

    def _evaluate_ahead(self, block: Block) -> None:
        """Evaluate the integers of a block ahead of its walk."""
        for op in block.ops:
            if len(op.outputs) == 1 and op.outputs[0].kind == "int" and not op.outputs[0].tensor:
                self.forget(op.results[0])
                self.propagate(op)

    def _value_or_guess(self, name: str) -> Value | None:
        return self.values.get(name, self.guesses.get(name))


def _iteration_values(lower: Value, step: Value, count: Value, body: Block) -> Value:
    """The representative of a loop's variable: an inner bound that is linear in it keeps its mean either way.

    It is the middle iteration; or, where an inner loop may depend on it in another way (`tile % width`) and all
    programs iterate alike, another iteration for each sampled program.
    """
    counts = count if isinstance(count, tuple) else (count,)
    inner = any(op.name in ("scf.for", "scf.while") for op in body.ops)
    if not inner or max(counts) - min(counts) > 1 or max(counts) != int(max(counts)):
        return lift(_mean_index, lower, step, count)
    places = program_ids(ITERATION_AXIS, int(max(counts)))
    return lift(lambda first, by, place: first + by * place, lower, step, places)


def _mean_index(lower: float, step: float, count: float) -> float:
    middle = lower + step * max(count - 1, 0) / 2
    return int(middle) if float(middle).is_integer() else middle
