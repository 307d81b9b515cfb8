"""Loads of whole tiles through tensor descriptors: the device's copy engine (TMA) computes the addresses.

A load qualifies when its address is one argument plus rows and columns of a matrix, its mask only keeps rows
and columns inside the matrix, and the call's arguments are known to be aligned as the hardware wants it.
Elements outside become zero, as with `other=0`.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from forecast_harness.rewrites.triton.affine import NotProvable, Sum, induced, tests
from forecast_harness.rewrites.triton.facts import Facts
from forecast_harness.rewrites.triton.loops import Access, Loop, accesses, always, loops
from forecast_harness.rewrites.triton.ordering import docstring
from forecast_harness.rewrites.triton.protocol import Context, Edit
from forecast_harness.rewrites.triton.spill import stays_inside
from forecast_harness.rewrites.triton.tiles import Tiles, Wrapped, lanes, spread_room
from forecast_harness.rewrites.triton.unit import Unit, expression, fresh, names, statements, stored, swap

_BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
_ALIGNED = 16
_ENDLESS = "2147483647"
"""Extent of a side along which the load has no bound: no element is ever outside."""


@dataclass
class _Side:
    """One axis of a tile."""

    lane: str
    stride: Sum
    block: str
    offset: Sum = field(default_factory=Sum)
    limit: str = _ENDLESS
    wrapped: Wrapped | None = None


@dataclass(frozen=True)
class _Tile:
    """One load as a tile of a matrix."""

    access: Access
    root: str
    """The argument that is loaded from."""
    base: Sum
    """Where the matrix begins: `root`, and what is added to it."""
    sides: tuple[_Side, _Side]
    inner: int
    """The axis whose elements are neighbours in memory."""


def describe(unit: Unit, context: Context) -> Iterator[Edit]:
    """Replace loads that feed dots by loads through descriptors, where all preconditions are shown."""
    if context.arch < 90 or not context.arguments:
        return
    facts, taken = Facts(unit, unit.entry), names(unit.entry) | set(unit.functions)
    draft, changed = unit.copy(), 0
    for loop in loops(unit, unit.entry):
        if not loop.dots or not loop.innermost or loop.leaves or not loop.ascending:
            continue
        for tile in _tiles(facts, loop, context):
            _load(draft, facts, loop, tile, taken)
            changed += 1
    if changed:
        yield Edit(draft, f"{changed} tile(s) are loaded by the copy engine, through tensor descriptors", 7.0)


def _tiles(facts: Facts, loop: Loop, context: Context) -> list[_Tile]:
    body = loop.node.body
    varying = frozenset(stored(loop.node))
    reader = Tiles(facts, varying, loop.node.lineno, {loop.counter: Sum.of(loop.counter)})
    reader.local |= induced(reader, loop)
    masks: dict[str, ast.expr] = {}
    found, again = [], stored(body)
    for statement in body:
        simple = isinstance(statement, ast.Assign) and len(statement.targets) == 1
        for access in accesses(facts.unit, statement) if simple else []:
            if access.kind != "load" or not access.plain or not always(statement, access.call):
                continue
            try:
                tile = _tile(reader, access, masks, context)
                for side in tile.sides:
                    if side.wrapped and not stays_inside(facts, access.call, side.lane, side.wrapped, reader):
                        raise NotProvable("elements outside might be stored")
                found.append(tile)
            except NotProvable:
                pass
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if isinstance(statement, ast.Assign) and isinstance(target, ast.Name) and again.count(target.id) == 1:
            masks[target.id] = statement.value
        reader.assign(statement)
    return found


def _tile(reader: Tiles, access: Access, masks: dict[str, ast.expr], context: Context) -> _Tile:
    address = reader.sum(access.pointer)
    roots = reader.facts.roots(access.pointer)
    if roots is None or len(roots) != 1:
        raise NotProvable("the address is not one argument's")
    (root,) = roots
    given = next((a for a in context.arguments if a.name == root and a.kind == "tensor"), None)
    if given is None or not given.aligned or (given.dtype or "") not in _BYTES:
        raise NotProvable(f"{root} is not known to be aligned")
    size = _BYTES[given.dtype or ""]
    sides = (_side(reader, address, 0), _side(reader, address, 1))
    inner = _inner(sides, context)
    outer = _number(sides[1 - inner].stride, context)
    if outer is None or outer * size % _ALIGNED:
        raise NotProvable("rows are not known to be aligned")
    left = address
    for side in sides:
        left -= Sum.of(side.lane) * side.stride
    rooms = [spread_room(reader, t) for t in tests(access.mask, masks)] if access.mask is not None else []
    for axis in sorted((0, 1), key=lambda i: not sides[i].stride.atoms()):
        left = _place(sides[axis], left, rooms, reader)
    numbers = [left.text(), *(text for s in sides for text in (s.offset.text(), s.limit, s.stride.text()))]
    if any(reader.facts.shape(expression(text)) for text in numbers):
        raise NotProvable("rows are gathered")
    other = [k.value for k in access.call.keywords if k.arg == "other"] + access.call.args[2:]
    if rooms or any(not isinstance(o, ast.Constant) or o.value != 0 for o in other):
        raise NotProvable("the mask says more than where the matrix ends")
    if left.terms.get((root,)) != 1:
        raise NotProvable(f"{root} is changed before")
    for product, times in (left - Sum.of(root)).terms.items():
        known = [n for a in product if (n := _number(Sum.of(a), context)) is not None]
        if math.prod([times, *known]) * size % _ALIGNED:
            raise NotProvable("the matrix does not begin at an aligned address")
    return _Tile(access, root, left, sides, inner)


def _side(reader: Tiles, address: Sum, axis: int) -> _Side:
    found = [a for a in lanes(address) if a.endswith(f"@{axis}")]
    if len(found) != 1 or len(lanes(address)) != 2:
        raise NotProvable("the address has other lanes than rows and columns")
    lane = found[0]
    stride = address.with_factor(lane)
    if list(stride.terms.values()) != [1]:
        raise NotProvable(f"the stride {stride.text()} is no single product")
    wrapped = reader.wraps.get(lane.rpartition("@")[0])
    if wrapped is None:
        return _Side(lane, stride, lane.removeprefix("arange<").rpartition(">")[0])
    (inner,) = lanes(wrapped.offsets) if len(lanes(wrapped.offsets)) == 1 else ("",)
    if not inner.startswith("arange<") or wrapped.offsets.with_factor(inner) != Sum.of(times=1):
        raise NotProvable("what is wrapped is no range of offsets")
    block = inner.removeprefix("arange<").rpartition(">")[0]
    return _Side(lane, stride, block, wrapped.offsets.without(inner), wrapped.size.text(), wrapped)


def _inner(sides: Sequence[_Side], context: Context) -> int:
    for axis in (1, 0):
        if _number(sides[axis].stride, context) == 1:
            return axis
    raise NotProvable("no axis is known to be contiguous")


def _number(found: Sum, context: Context) -> int | None:
    """Value of a sum of known scalars; None if one is not known."""
    total = 0
    for product, times in found.terms.items():
        values = [context.value(a) for a in product]
        known = [v for v in values if v is not None]
        if len(known) < len(values):
            return None
        total += times * math.prod(known)
    return total


def _place(side: _Side, left: Sum, rooms: list[Sum], reader: Tiles) -> Sum:
    """Find where the tile begins along an axis, and where the matrix ends; returns what else is added.

    Takes the conditions of the axis out of `rooms`.
    """
    if side.wrapped is None:
        mine = [r for r in rooms if lanes(r) == [side.lane]]
        room = mine[0] if mine else None
        factors = next(iter(side.stride.terms))
        for product, times in left.terms.items():
            rest = list(product)
            if any(f not in rest for f in factors):
                continue
            for factor in factors:
                rest.remove(factor)
            term = Sum.of(*rest, times=times)
            told = room is not None and all(room.terms.get(p) == -t for p, t in term.terms.items())
            if factors or told or (room is None and {side.block, *reader.local} & set(rest)):
                side.offset += term
        if room is not None:
            limit = room + Sum.of(side.lane) + side.offset
            if lanes(limit) or limit.atoms() & reader.varying:
                raise NotProvable("the mask's bound moves with the tile")
            side.limit = limit.text()
            rooms.remove(room)
        left -= side.offset * side.stride
    return left


def _load(draft: Unit, facts: Facts, loop: Loop, tile: _Tile, taken: set[str]) -> None:
    """Make a descriptor before the loop, and load through it."""
    order = (1 - tile.inner, tile.inner)
    sides = [tile.sides[axis] for axis in order]
    name = fresh(f"{tile.root}_tiles", taken)
    # What is added to the address counts elements and may need 64 bits, though its factors do not.
    added = tile.base - Sum.of(tile.root)
    wide = [
        " * ".join([f"{draft.tl}.cast({times}, {draft.tl}.int64)", *p]) for p, times in added.terms.items()
    ]
    code = (
        f"{name} = {draft.tl}.make_tensor_descriptor({' + '.join([tile.root, *wide])}, "
        f"[{sides[0].limit}, {sides[1].limit}], [{sides[0].stride.text()}, 1], "
        f"[{sides[0].block}, {sides[1].block}])"
    )
    call = draft.twin(tile.access.call)
    new = expression(f"{name}.load([{sides[0].offset.text()}, {sides[1].offset.text()}])")
    swap(draft.twin(loop.node), {id(call): draft.language("trans", new) if tile.inner == 0 else new})
    made = statements(code)
    # Best made once, at the top, if nothing in it is computed by the kernel.
    if ({n for s in made for n in names(s)} - {name}) & set(facts.definitions):
        block, node = draft.twin(loop.block), draft.twin(loop.node)
        at = next(i for i, s in enumerate(block) if s is node)
    else:
        block, at = draft.entry.body, docstring(draft.entry.body)
    block[at:at] = made
