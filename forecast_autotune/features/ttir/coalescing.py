"""How loads and stores reach the first-level cache: vector width, instructions, and the lines they touch.

Triton lays each access out by rules that TTIR already decides (its axis analysis and coalescing pass, 3.4
to 3.9): a thread holds as many neighbouring elements as the widest access of that shape could move in 16
bytes. An access that is not aligned, masked unevenly or strided moves them one by one instead, with its
lanes that far apart, and every instruction then touches many lines of the cache for little of each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forecast_autotune.features.ttir.parser import Block, Op, Type
from forecast_autotune.features.ttir.scalars import Value, predicate
from forecast_autotune.features.ttir.tensors import UNBROKEN, Strides

COUNTED_WARPS = (1, 2, 4, 8, 16, 32)
"""Numbers of warps for which accesses are counted: TTIR is the same for all of them."""
ALIGNMENT = 16
"""The alignment that Triton specialises arguments on: pointers in bytes, and integers that are multiples of it."""
WARP_SIZE, CACHE_LINE_BYTES, SECTOR_BYTES = 32, 128, 32
"""Threads of a warp, bytes of a cache line and of the part of it that memory writes at once."""
VECTOR_ELEMENTS = 8
"""Neighbouring elements that a thread holds of what it loaded, as a rule."""
UNKNOWN_MASK_STRIDE = (0, 1)
"""The stride of a mask whose neighbours may all differ."""
_MAX_VECTOR_BYTES = 16
"""Bytes that one thread moves at once."""
_MAX_DIVISOR = 1 << 20
_ALWAYS_MERGED_BYTES, _NEVER_MERGED_BYTES = 512.0, 4096.0
"""Bytes of other stores between two to one sector: so few, and they arrive as one; so many, and never."""
_HINT = re.compile(r"tt\.divisibility = (?:dense<\[?)?(\d+)")
_START = re.compile(r"start = (\d+)")
_DIVISOR_PRESERVING_OPS = frozenset(
    (
        *("tt.splat", "tt.unsplat", "tt.broadcast", "tt.expand_dims", "tt.trans", "tt.reshape", "tt.bitcast"),
        *("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast", "arith.index_castui"),
    )
)
_MIN_DIVISOR_OPS = frozenset(
    (
        *("arith.addi", "arith.subi", "arith.remsi", "arith.remui", "arith.select"),
        *("arith.minsi", "arith.maxsi", "arith.minui", "arith.maxui"),
    )
)


@dataclass(frozen=True)
class TileAccess:
    """A load or store of a tile, as its layout sees it."""

    shape: tuple[int, ...]
    steps: tuple[int | None, ...]
    """Elements in memory from one to the next, by dimension; None: unknown."""
    axis: int
    """The dimension along which threads follow one another."""
    run: int
    """Elements that lie next to each other."""
    element: float
    """Bytes."""
    wide: int
    """Neighbouring elements that one thread could move at once if no mask parted them."""
    vector: int
    """Neighbouring elements that one thread does move at once."""
    store: bool


def divisor(
    op: Op, known: Mapping[str, int], strides: Mapping[str, Strides], values: Mapping[str, Value]
) -> int:
    """The power of two that the compiler sees to divide an integer or a pointer (in bytes).

    For a tensor it divides every element that a run of neighbours begins with.
    """
    if "tt.divis" in op.text and (hint := _HINT.search(op.text)) is not None:
        return _power_of_two_divisor(int(hint.group(1)))
    name = op.name
    of = [known.get(operand, 1) for operand in op.operands]
    if name == "arith.constant":
        value = values.get(op.results[0])
        return _power_of_two_divisor(value) if isinstance(value, int) else 1
    if name == "tt.make_range":
        start = range_start(op)
        return 1 if start is None else _power_of_two_divisor(start)
    if not of:
        return 1
    if name in _DIVISOR_PRESERVING_OPS:
        return of[0]
    if name in _MIN_DIVISOR_OPS:
        return min(of[-2:])
    if name == "tt.addptr":
        return min(of[0], of[1] * _pointee_bytes(op.inputs[0]))
    if name in ("arith.muli", "arith.shli") and len(of) == 2:
        runs = [any(step == 1 for step, _ in strides.get(operand, ())) for operand in op.operands]
        if name == "arith.shli":
            by = values.get(op.operands[1])
            of[1] = 1 << min(20, by) if isinstance(by, int) and by >= 0 else 1
        # Only the first element of a run is known; the others are odd as often as not.
        return min(_MAX_DIVISOR, (1 if runs[0] else of[0]) * (1 if runs[1] else of[1]))
    return 1


def range_start(op: Op) -> int | None:
    """The first number of a `tt.make_range`; None for text that does not say."""
    match = _START.search(op.text)
    return int(match.group(1)) if match else None


def loop_growth_divisor(
    name: str,
    yielded: str,
    body: Block,
    known: Mapping[str, int],
    strides: Mapping[str, Strides],
    values: Mapping[str, Value],
) -> int:
    """The divisor of a loop's increment of its carried value `name`; 1 if the increment is not recognised."""
    if yielded == name:
        return _MAX_DIVISOR
    results = dict(known)
    for op in body.ops:
        if yielded in op.results:
            addends = [operand for operand in op.operands if operand != name]
            if op.name not in ("arith.addi", "tt.addptr") or len(addends) != 1:
                return 1
            return results.get(addends[0], 1) * _pointee_bytes(op.inputs[0])
        if len(op.outputs) == 1 and op.outputs[0].kind == "int":
            results[op.results[0]] = divisor(op, results, strides, values)
    return 1


def comparison_strides(op: Op, known: Mapping[str, int], strides: Mapping[str, Strides]) -> Strides:
    """The number of neighbours with one answer of a comparison, as the compiler sees it; as `strides`."""
    left, right = (strides.get(operand) for operand in op.operands)
    if left is None or right is None or len(left) != len(right):
        return (UNKNOWN_MASK_STRIDE,) * len(op.outputs[0].shape)
    even = min(known.get(operand, 1) for operand in op.operands) if predicate(op) in ("lt", "ge") else 1
    return tuple(
        (0, min(over, under) if a == 0 and b == 0 else even if {a, b} == {0, 1} else 1)
        for (a, over), (b, under) in zip(left, right, strict=True)
    )


def tile_access(
    pointer: Type,
    steps: Strides | None,
    run: tuple[int, int | None],
    divides: int,
    mask: Strides | None,
    store: bool,
) -> TileAccess:
    """An access through a tensor of pointers.

    `run` is its `tensors.contiguous_run`, `divides` the divisor of its pointers in bytes, `mask` the strides of its
    mask; None where there is none.
    """
    shape, element = pointer.shape, _pointee_bytes(pointer)
    axis = run[1] if run[1] is not None else max(len(shape) - 1, 0)
    wide = max(1, min(_power_of_two_floor(run[0]), divides // element, _MAX_VECTOR_BYTES // element))
    even = UNBROKEN
    if mask is not None and axis < len(mask):
        step, over = mask[axis]
        even = over if step == 0 else 1
    gaps = tuple(step for step, _ in steps) if steps is not None else (None,) * len(shape)
    return TileAccess(shape, gaps, axis, run[0], element, wide, min(wide, _power_of_two_floor(even)), store)


def access_counts(touches: Mapping[TileAccess, float]) -> dict[str, float]:
    """Instructions of all warps and the lines that they touch, per number of warps, as fields of `Facts`.

    `touches` counts each access in the mean program. Where a tile has fewer elements than there are threads, loads
    are made more than once and stores are not.
    """
    widest: dict[tuple[tuple[int, ...], int], int] = {}
    for tile in touches:
        key = tile.shape, tile.axis
        widest[key] = max(widest.get(key, 1), tile.wide)
    results = {f"{what}_{warps}": 0.0 for what in ("accesses", "lines") for warps in COUNTED_WARPS}
    for tile, times in touches.items():
        elements = math.prod(tile.shape)
        width = tile.wide if tile.store else widest[tile.shape, tile.axis]
        lines: dict[tuple[int, int], float] = {}
        for warps in COUNTED_WARPS:
            most = _power_of_two_floor(elements // (WARP_SIZE * warps))
            apart, vector = min(most, width), min(most, tile.vector)
            if (apart, vector) not in lines:
                lines[apart, vector] = _lines_per_instruction(tile, apart)
            result = times * max(0.0 if tile.store else float(warps), elements / WARP_SIZE / vector)
            results[f"accesses_{warps}"] += result
            results[f"lines_{warps}"] += result * lines[apart, vector]
    return results


def partial_bytes(touches: Mapping[TileAccess, float]) -> float:
    """Bytes of the sectors that stores of the mean program write in parts, each part counted as a sector.

    Memory reads such a sector before it writes it (error correction). A store with gaps is completed by rows at
    indices from memory (tokens in a page) or, where the gaps are less than a sector, by the store of the elements
    between: if not much else is stored in the meantime. Rows that are merely short are completed by the neighbouring
    programs, at about the same time.
    """
    return math.fsum(times * _partial_sector_bytes(tile) for tile, times in touches.items() if tile.store)


def _partial_sector_bytes(tile: TileAccess) -> float:
    elements, whole = math.prod(tile.shape), SECTOR_BYTES / tile.element
    step = tile.steps[tile.axis]
    if elements == 1 or tile.run > 1 or step == 0:
        return 0.0
    together = max(1.0, min(whole / abs(step), elements)) if step else 1.0
    unknown = [size for size, step in zip(tile.shape, tile.steps, strict=True) if step is None]
    rows = math.prod(unknown) / (tile.shape[tile.axis] if step is None else 1)
    together *= min(whole / together, rows) ** _merged_share(tile.shape[tile.axis] * tile.element)
    if step and abs(step) < whole:
        together *= min(whole / together, abs(step)) ** _merged_share(elements * tile.element)
    return SECTOR_BYTES * elements / together if together < whole else 0.0


def _merged_share(between: float) -> float:
    """Share of pairs of stores to one sector that arrive as one, with `between` bytes stored between them."""
    return min(
        1.0,
        max(
            0.0,
            math.log(_NEVER_MERGED_BYTES / max(between, 1.0))
            / math.log(_NEVER_MERGED_BYTES / _ALWAYS_MERGED_BYTES),
        ),
    )


def warp_exchange_counts(
    reductions: Mapping[tuple[tuple[int, ...], int], float], touches: Mapping[TileAccess, float]
) -> dict[str, float]:
    """Elements that warps exchange in reductions and scans, per number of warps, as fields of `Facts`.

    `reductions` counts those of the mean program by shape and dimension. Threads are spread over the dimensions after
    that one first, each with as many neighbours as it loads at once; the remaining warps share the results. An element
    counts by the share of a warp's lanes that meet in one bank of shared memory.
    """
    results = {f"exchanged_{warps}": 0.0 for warps in COUNTED_WARPS}
    widest: dict[tuple[int, ...], int] = {}
    for tile in touches:
        widest[tile.shape] = max(widest.get(tile.shape, 1), tile.wide)
    for (shape, axis), times in reductions.items():
        inner, vector = math.prod(shape[axis + 1 :]), widest.get(shape, VECTOR_ELEMENTS)
        for warps in COUNTED_WARPS if inner > 1 else ():
            sharing = min(float(warps), float(shape[axis]), vector * WARP_SIZE * warps / inner)
            if sharing > 1:
                meeting = min(1.0, vector * sharing / WARP_SIZE)
                results[f"exchanged_{warps}"] += times * meeting * sharing * math.prod(shape) / shape[axis]
    return results


def coalesced_access_counts(nbytes: float) -> dict[str, Any]:
    """The same fields for accesses of which only the bytes are known: whole lines, 16 bytes per thread."""
    each = {"accesses": nbytes / WARP_SIZE / _MAX_VECTOR_BYTES, "lines": nbytes / CACHE_LINE_BYTES}
    return {f"{what}_{warps}": each[what] for what in each for warps in COUNTED_WARPS}


def _lines_per_instruction(tile: TileAccess, apart: int) -> float:
    """Lines that one instruction of a warp touches, its lanes `apart` elements from each other."""
    lanes, result = float(WARP_SIZE), 1.0
    for place in (tile.axis, *(n for n in reversed(range(len(tile.shape))) if n != tile.axis)):
        spacing = apart if place == tile.axis else 1
        here = min(lanes, max(1.0, tile.shape[place] / spacing))
        step = tile.steps[place]
        gap = CACHE_LINE_BYTES if step is None else min(CACHE_LINE_BYTES, abs(step) * spacing * tile.element)
        result *= max(1.0, here * gap / CACHE_LINE_BYTES)
        lanes /= here
        if lanes <= 1:
            break
    return result


def _pointee_bytes(type_: Type) -> int:
    """Bytes of a pointer's element; 1 for other types."""
    return max(1, type_.pointee.bits // 8) if type_.pointee is not None else 1


def _power_of_two_divisor(number: float) -> int:
    """The largest power of two that divides an integer."""
    whole = int(number)
    return min(_MAX_DIVISOR, whole & -whole) if whole else _MAX_DIVISOR


def _power_of_two_floor(number: int) -> int:
    """The largest power of two that is not above a number; 1 for less."""
    return 1 << (max(1, min(number, _MAX_DIVISOR)).bit_length() - 1)
