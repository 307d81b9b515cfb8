"""Facts of a TTIR function's tensors: contiguity, liveness, dependence, what feeds a dot."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from forecast_autotune.features.ttir.parser import Block, Op, Type
    from forecast_autotune.features.ttir.scalars import Value

Strides: TypeAlias = tuple[tuple[int | None, int], ...]
"""By dimension: how much an integer or pointer tensor grows per step, in elements (None: unknown), and
over how many steps it goes on like that before it jumps, as `x % 768` does after 768."""

UNBROKEN = 1 << 62
"""Steps of a dimension that never jumps."""
_CONSTANT_STRIDE = (0, UNBROKEN)

LOADS = frozenset(
    (
        *("tt.load", "tt.descriptor_load", "tt.descriptor_gather"),
        *("tt.experimental_descriptor_load", "tt.experimental_descriptor_gather"),
    )
)
STORES = frozenset(
    (
        *("tt.store", "tt.descriptor_store", "tt.descriptor_scatter"),
        *("tt.experimental_descriptor_store", "tt.experimental_descriptor_scatter"),
    )
)
DOTS = frozenset(("tt.dot", "tt.dot_scaled"))
ATOMICS = frozenset(
    ("tt.atomic_rmw", "tt.atomic_cas", "tt.descriptor_reduce", "tt.experimental_descriptor_reduce")
)
REDUCTIONS = frozenset(("tt.reduce", "tt.scan"))
REGION_FUNCTIONS = frozenset(("tt.reduce", "tt.scan", "tt.map_elementwise"))
"""Operations whose region is a scalar function, not code that runs once per program."""
_LATENCY_OPS = LOADS | DOTS | ATOMICS | {"tt.reduce", "tt.scan", "tt.gather", "tt.histogram"}
"""Operations whose latency a dependent operation has to wait for."""

_CASTS = frozenset(
    (
        *("arith.extf", "arith.truncf", "arith.sitofp", "arith.uitofp", "arith.fptosi", "arith.fptoui"),
        *("arith.extsi", "arith.extui", "arith.trunci", "arith.bitcast"),
        *("tt.fp_to_fp", "tt.bitcast", "tt.trans", "tt.reshape"),
    )
)
_VIEWS = frozenset(("tt.expand_dims", "tt.broadcast", "tt.splat", "tt.unsplat"))
_REMATERIALIZABLE_OPS = frozenset(
    ("tt.make_range", "tt.addptr", "tt.splat", "tt.expand_dims", "tt.broadcast")
)
_ADDRESSES = frozenset(("tt.addptr", "arith.addi", "arith.subi", "arith.muli", "arith.extsi", "arith.extui"))
_REMATERIALIZABLE_ARITHMETIC = re.compile(
    r"arith\.(?:constant|addi|subi|muli|div\wi|rem\wi|m(?:in|ax)\wi|ext\wi|trunci|index_cast\w*|cmpi|andi|ori|xori|select)"
)
_AXIS = re.compile(r"axis = (\d+)")
_ORDER = re.compile(r"array<i32: ([\d, ]+)>")


def result_strides(op: Op, known: Mapping[str, Strides], values: Mapping[str, Value]) -> Strides:
    """The strides of an operation's result, as far as they can be seen."""
    name = op.name
    shape = op.outputs[0].shape
    if name == "tt.make_range":
        return ((1, UNBROKEN),)
    if name in ("tt.splat", "arith.constant"):
        return (_CONSTANT_STRIDE,) * len(shape)
    if not op.operands or not op.inputs:
        return _unknown_strides(shape)
    last = len(op.inputs) - 1
    sources = [
        known.get(operand) or _unknown_strides(op.inputs[min(place, last)].shape)
        for place, operand in enumerate(op.operands)
    ]
    first = sources[0]
    if name == "tt.expand_dims":
        match = _AXIS.search(op.text)
        axis = int(match.group(1)) if match else 0
        return (*first[:axis], _CONSTANT_STRIDE, *first[axis:])
    if name == "tt.reshape":
        steps = [step for step, n in zip(first, op.inputs[0].shape, strict=True) if n > 1]
        if [n for n in op.inputs[0].shape if n > 1] != [n for n in shape if n > 1]:
            return _unknown_strides(shape)
        return tuple(steps.pop(0) if n > 1 else _CONSTANT_STRIDE for n in shape)
    if name == "tt.broadcast":
        return tuple(
            _CONSTANT_STRIDE if n == 1 else s for s, n in zip(first, op.inputs[0].shape, strict=True)
        )
    if name == "tt.trans":
        match = _ORDER.search(op.text)
        return tuple(first[int(n)] for n in match.group(1).split(",")) if match else first[::-1]
    if name in ("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast", "tt.bitcast"):
        return first
    if name == "arith.select" and len(sources) == 3:
        # Out-of-range lanes get one safe index: the others keep their runs.
        return sources[2] if _is_uniform(sources[1]) else sources[1]
    if len(sources) != 2 or len(first) != len(sources[1]):
        return _unknown_strides(shape)
    return _binary_strides(op, first, sources[1], values)


def _binary_strides(op: Op, first: Strides, second: Strides, values: Mapping[str, Value]) -> Strides:
    name = op.name
    if op.outputs[0].bits == 1 and name in ("arith.andi", "arith.ori", "arith.xori"):
        return tuple(
            (0 if a == b == 0 else None, min(over, under))
            for (a, over), (b, under) in zip(first, second, strict=True)
        )
    if name in ("arith.addi", "tt.addptr", "arith.subi"):
        sign = -1 if name == "arith.subi" else 1
        return tuple(
            (None if a is None or b is None else a + sign * b, min(over, under))
            for (a, over), (b, under) in zip(first, second, strict=True)
        )
    if name == "arith.muli":
        moving, uniform, factor = (first, second, 1) if _is_uniform(second) else (second, first, 0)
        by = values.get(op.operands[factor]) if _is_uniform(uniform) else None
        return tuple(
            (0 if s == 0 else None if s is None or not isinstance(by, int) else s * by, over)
            for s, over in moving
        )
    if not _is_uniform(second):
        return _unknown_strides(op.outputs[0].shape)
    by = values.get(op.operands[1])
    by = by if isinstance(by, int) and by > 0 else None
    if name in ("arith.remsi", "arith.remui"):
        # Wrapping a range by an unknown size is written to keep runs whole: `(start + range) % M`.
        return tuple((s, min(over, max(1, by // s)) if by and s and s > 0 else over) for s, over in first)
    if name in ("arith.divsi", "arith.divui"):
        return tuple(_divided_stride(s, over, by) for s, over in first)
    if name in ("arith.minsi", "arith.maxsi"):  # clamping, likewise
        return first
    return (_CONSTANT_STRIDE,) * len(first) if _is_uniform(first) else _unknown_strides(op.outputs[0].shape)


def _divided_stride(step: int | None, over: int, by: int | None) -> tuple[int | None, int]:
    """A dimension divided by a number: it stands still as long as the quotient does."""
    if step == 0:
        return step, over
    if step is None or by is None or step < 0:
        return None, over
    if by % step == 0:
        return 0, min(over, by // step)
    return (step // by if step % by == 0 else None), over


def _is_uniform(steps: Strides) -> bool:
    """Whether all elements are equal."""
    return all(step == 0 and over == UNBROKEN for step, over in steps)


def _unknown_strides(shape: Sequence[int]) -> Strides:
    return tuple(_CONSTANT_STRIDE if size == 1 else (None, UNBROKEN) for size in shape)


def contiguous_run(shape: Sequence[int], steps: Strides | None) -> tuple[int, int | None]:
    """How many elements of one access lie next to each other in memory, and along which dimension.

    At least 1; the dimension is None when no two neighbours can be seen to lie next to each other.
    """
    run, axis = 1, None
    axes = [(size, step, place) for place, (size, step) in enumerate(zip(shape, steps or (), strict=False))]
    axes = [entry for entry in axes if entry[0] > 1]
    while (result := next((entry for entry in axes if entry[1][0] == run), None)) is not None:
        size, (_, over), place = result
        axis = place if axis is None else axis
        run *= min(size, over)
        if over < size:
            break
        axes.remove(result)
    return run, axis


def reduction_axis(op: Op) -> tuple[tuple[int, ...], int]:
    """The shape of a reduction's or scan's input, and the dimension along which it joins elements."""
    shape = op.inputs[0].shape or (1,)
    match = _AXIS.search(op.text)
    return shape, min(int(match.group(1)), len(shape) - 1) if match else len(shape) - 1


def nested_blocks(op: Op) -> Iterator[Block]:
    """The blocks that run as part of an operation."""
    if op.name not in REGION_FUNCTIONS:
        for region in op.regions:
            yield from region


def walk_ops(blocks: Sequence[Block], *, into_loops: bool = True) -> Iterator[Op]:
    """All operations in program order, with those of nested regions after their owner."""
    for block in blocks:
        for op in block.ops:
            yield op
            if op.regions and (into_loops or op.name not in ("scf.for", "scf.while")):
                yield from walk_ops(list(nested_blocks(op)), into_loops=into_loops)


def pipelined_bytes(loop: Op) -> tuple[float, float] | None:
    """Bytes per iteration of (loads that feed a dot, all loads) of an innermost loop with loads.

    None when the loop has no loads of its own, or a loop inside it has some.
    """
    body = list(nested_blocks(loop))
    own = list(walk_ops(body, into_loops=False))
    deeper = sum(op.name in LOADS for op in walk_ops(body)) - sum(op.name in LOADS for op in own)
    loads = [op for op in own if op.name in LOADS and op.outputs and op.outputs[0].tensor]
    if deeper or not loads:
        return None
    makers = {result: op for op in own for result in op.results}
    feeding: set[int] = set()
    for dot in (op for op in own if op.name in DOTS):
        inputs = dot.operands[:2] if dot.name == "tt.dot" else dot.operands[:-1]
        for operand in inputs:
            maker = makers.get(operand)
            while maker is not None and maker.name in _CASTS:
                maker = makers.get(maker.operands[0])
            if maker is not None and maker.name in LOADS:
                feeding.add(id(maker))
    sizes = [(op.outputs[0].nbytes, id(op) in feeding) for op in loads]
    return math.fsum(size for size, feeds in sizes if feeds), math.fsum(size for size, _ in sizes)


def serial_chain(blocks: Sequence[Block], counted: Set[str] = _LATENCY_OPS) -> int:
    """Operations of these names on the longest path of dependences through these blocks."""
    depth: dict[str, int] = {}

    def follow(group: Sequence[Block], start: int) -> int:
        deepest = start
        for block in group:
            for op in block.ops:
                at = max((depth.get(operand, 0) for operand in (*op.operands, *op.inits)), default=0)
                if op.regions and op.name not in REGION_FUNCTIONS:
                    inside = list(nested_blocks(op))
                    for part in inside:
                        for name in part.arguments:
                            depth[name] = at
                    at = max(at, follow(inside, at))
                at += op.name in counted
                for result in op.results:
                    depth[result] = at
                deepest = max(deepest, at)
        return deepest

    return follow(blocks, 0)


def live_bytes(blocks: Sequence[Block]) -> float:
    """Most bytes of tensors alive at one program point: a lower bound on the registers' contents.

    Tensors that the compiler recomputes (constants, ranges, splats and integer or pointer
    arithmetic on nothing but those) are free; views share their source, and so do addresses made of one
    narrower value (the number of a row, for a tile of it) and free ones; other pointers count 4
    bytes per element and booleans one bit. A carried value of a loop replaces the one it started
    from. Operations reuse their operands' space.
    """
    scan = _Liveness()
    return max((scan.block(block)[0] for block in blocks), default=0.0)


class _Liveness:
    def __init__(self) -> None:
        self.cheap: set[str] = set()
        self.source: dict[str, str] = {}
        self.elements: dict[str, int] = {}

    def root(self, name: str) -> str:
        return self.source.get(name, name)

    def block(self, block: Block) -> tuple[float, set[str]]:
        """Peak bytes inside a block, and the values from outside that it uses."""
        size: dict[str, float] = {}
        for name, type_ in zip(block.arguments, block.types, strict=False):
            self.source.pop(name, None)
            (self.cheap.discard if type_.tensor else self.cheap.add)(name)
            size[name] = _register_bytes(type_)
            self.elements[name] = type_.elements
        last: dict[str, float] = dict.fromkeys(size, -1.0)
        inside: list[float] = []
        for place, op in enumerate(block.ops):
            peak, uses = 0.0, set()
            for part in nested_blocks(op):
                part_peak, part_uses = self.block(part)
                peak = max(peak, part_peak)
                uses |= part_uses
            for name in map(self.root, op.inits):
                # The carried argument takes over: the start value need not outlive the loop's entry.
                last[name] = max(last.get(name, -1.0), place - 0.5)
            for name in (*map(self.root, op.operands), *uses):
                last[name] = place
            inside.append(peak)
            self._define(op, size)
        outer = {name for name in last if name not in size}
        return self._sweep(block, size, last, inside), outer

    def _define(self, op: Op, size: dict[str, float]) -> None:
        sources = [name for name in op.operands if name in self.cheap]
        simple = _is_rematerializable(op.name)
        for result, type_ in zip(op.results, op.outputs, strict=False):
            self.source.pop(result, None)
            self.cheap.discard(result)
            if simple and len(sources) == len(op.operands):
                self.cheap.add(result)
                size[result] = 0.0
            elif op.name in _ADDRESSES and (narrow := self._narrow(op, type_)) is not None:
                self.source[result] = narrow
            elif op.name in _VIEWS:
                self.source[result] = self.root(op.operands[0])
            elif not type_.tensor:
                self.cheap.add(result)
                size[result] = 0.0
            else:
                size[result] = _register_bytes(type_)
                self.elements[result] = type_.elements

    def _narrow(self, op: Op, type_: Type) -> str | None:
        """The one value behind a tile of addresses, if that is narrower: a loaded row number, say.

        The tile itself is then a sum that every access makes anew, mostly of constants.
        """
        roots = {self.root(name) for name in op.operands if name not in self.cheap}
        if len(roots) != 1:
            return None
        root = roots.pop()
        return root if 4 * self.elements.get(root, type_.elements) <= type_.elements else None

    @staticmethod
    def _sweep(
        block: Block, size: dict[str, float], last: dict[str, float], inside: Sequence[float]
    ) -> float:
        dying: dict[float, float] = {}
        for name, place in last.items():
            dying[place] = dying.get(place, 0.0) + size.get(name, 0.0)
        alive = sum(size[name] for name in block.arguments) - dying.get(-1.0, 0.0)
        peak = alive
        for place, op in enumerate(block.ops):
            alive -= dying.get(place - 0.5, 0.0)
            peak = max(peak, alive + inside[place])
            alive -= dying.get(float(place), 0.0)
            for name in op.results:
                if name in last:
                    alive += size.get(name, 0.0)
        return max(peak, alive)


@lru_cache(maxsize=512)
def _is_rematerializable(name: str) -> bool:
    return name in _REMATERIALIZABLE_OPS or _REMATERIALIZABLE_ARITHMETIC.fullmatch(name) is not None


def _register_bytes(type_: Type) -> float:
    """Bytes a tensor takes in registers; scalars are free."""
    if not type_.tensor:
        return 0.0
    return type_.elements * (4.0 if type_.kind == "pointer" else type_.bits / 8)
