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

from forecast_harness.authors.triton.analysis.function_facts import FunctionFacts
from forecast_harness.authors.triton.analysis.loops import (
    MemoryAccess,
    RangeLoop,
    accesses,
    always_executes,
    loops,
)
from forecast_harness.authors.triton.analysis.outside_flow import never_stored_outside
from forecast_harness.authors.triton.analysis.polynomials import (
    NotProvable,
    Polynomial,
    induction_variables,
    mask_conditions,
)
from forecast_harness.authors.triton.analysis.source_unit import (
    SourceUnit,
    assigned_names,
    fresh_name,
    names,
    parse_expression,
    parse_statements,
    swap_expressions,
)
from forecast_harness.authors.triton.analysis.tile_addresses import (
    TileReader,
    WrappedOffsets,
    lane_atoms,
    spread_positive_form,
)
from forecast_harness.authors.triton.program_order import docstring_length
from forecast_harness.authors.triton.protocol import RewriteContext, SourceEdit

_BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
_ALIGNMENT_BYTES = 16
_UNBOUNDED = "2147483647"
"""Extent of a side along which the load has no bound: no element is ever outside."""


@dataclass
class _TileAxis:
    """One axis of a tile."""

    lane: str
    stride: Polynomial
    block: str
    offset: Polynomial = field(default_factory=Polynomial)
    limit: str = _UNBOUNDED
    wrapped: WrappedOffsets | None = None


@dataclass(frozen=True)
class _TileLoad:
    """One load as a tile of a matrix."""

    access: MemoryAccess
    root: str
    """The argument that is loaded from."""
    base: Polynomial
    """Where the matrix begins: `root`, and what is added to it."""
    sides: tuple[_TileAxis, _TileAxis]
    inner: int
    """The axis whose elements are neighbours in memory."""


def use_descriptors(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """Replace loads that feed dots by loads through descriptors, where all preconditions are shown."""
    if context.arch < 90 or not context.arguments:
        return
    facts, taken = FunctionFacts(unit, unit.entry), names(unit.entry) | set(unit.functions)
    draft, changed = unit.copy(), 0
    for loop in loops(unit, unit.entry):
        if not loop.has_dots or not loop.innermost or loop.may_exit_early or not loop.ascending:
            continue
        for tile in _tiles(facts, loop, context):
            _load_through_descriptor(draft, facts, loop, tile, taken)
            changed += 1
    if changed:
        yield SourceEdit(
            draft, f"{changed} tile(s) are loaded by the copy engine, through tensor descriptors", 7.0
        )


def _tiles(facts: FunctionFacts, loop: RangeLoop, context: RewriteContext) -> list[_TileLoad]:
    body = loop.node.body
    varying = frozenset(assigned_names(loop.node))
    reader = TileReader(facts, varying, loop.node.lineno, {loop.counter: Polynomial.of(loop.counter)})
    reader.local |= induction_variables(reader, loop)
    masks: dict[str, ast.expr] = {}
    found, again = [], assigned_names(body)
    for statement in body:
        simple = isinstance(statement, ast.Assign) and len(statement.targets) == 1
        for access in accesses(facts.unit, statement) if simple else []:
            if access.kind != "load" or not access.plain or not always_executes(statement, access.call):
                continue
            try:
                tile = _tile(reader, access, masks, context)
                for side in tile.sides:
                    if side.wrapped and not never_stored_outside(
                        facts, access.call, side.lane, side.wrapped, reader
                    ):
                        raise NotProvable("elements outside might be stored")
                found.append(tile)
            except NotProvable:
                pass
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if isinstance(statement, ast.Assign) and isinstance(target, ast.Name) and again.count(target.id) == 1:
            masks[target.id] = statement.value
        reader.assign(statement)
    return found


def _tile(
    reader: TileReader, access: MemoryAccess, masks: dict[str, ast.expr], context: RewriteContext
) -> _TileLoad:
    address = reader.polynomial(access.pointer)
    roots = reader.facts.root_parameters(access.pointer)
    if roots is None or len(roots) != 1:
        raise NotProvable("the address is not one argument's")
    (root,) = roots
    given = next((a for a in context.arguments if a.name == root and a.kind == "tensor"), None)
    if given is None or not given.aligned or (given.dtype or "") not in _BYTES:
        raise NotProvable(f"{root} is not known to be aligned")
    size = _BYTES[given.dtype or ""]
    sides = (_tile_axis(reader, address, 0), _tile_axis(reader, address, 1))
    inner = _contiguous_axis(sides, context)
    outer = _known_value(sides[1 - inner].stride, context)
    if outer is None or outer * size % _ALIGNMENT_BYTES:
        raise NotProvable("rows are not known to be aligned")
    left = address
    for side in sides:
        left -= Polynomial.of(side.lane) * side.stride
    rooms = (
        [spread_positive_form(reader, t) for t in mask_conditions(access.mask, masks)]
        if access.mask is not None
        else []
    )
    for axis in sorted((0, 1), key=lambda i: not sides[i].stride.atoms()):
        left = _tile_offset(sides[axis], left, rooms, reader)
    numbers = [left.text(), *(text for s in sides for text in (s.offset.text(), s.limit, s.stride.text()))]
    if any(reader.facts.shape(parse_expression(text)) for text in numbers):
        raise NotProvable("rows are gathered")
    other = [k.value for k in access.call.keywords if k.arg == "other"] + access.call.args[2:]
    if rooms or any(not isinstance(o, ast.Constant) or o.value != 0 for o in other):
        raise NotProvable("the mask says more than where the matrix ends")
    if left.terms.get((root,)) != 1:
        raise NotProvable(f"{root} is changed before")
    for product, times in (left - Polynomial.of(root)).terms.items():
        known = [n for a in product if (n := _known_value(Polynomial.of(a), context)) is not None]
        if math.prod([times, *known]) * size % _ALIGNMENT_BYTES:
            raise NotProvable("the matrix does not begin at an aligned address")
    return _TileLoad(access, root, left, sides, inner)


def _tile_axis(reader: TileReader, address: Polynomial, axis: int) -> _TileAxis:
    found = [a for a in lane_atoms(address) if a.endswith(f"@{axis}")]
    if len(found) != 1 or len(lane_atoms(address)) != 2:
        raise NotProvable("the address has other lanes than rows and columns")
    lane = found[0]
    stride = address.coefficient_of(lane)
    if list(stride.terms.values()) != [1]:
        raise NotProvable(f"the stride {stride.text()} is no single product")
    wrapped = reader.wraps.get(lane.rpartition("@")[0])
    if wrapped is None:
        return _TileAxis(lane, stride, lane.removeprefix("arange<").rpartition(">")[0])
    (inner,) = lane_atoms(wrapped.offsets) if len(lane_atoms(wrapped.offsets)) == 1 else ("",)
    if not inner.startswith("arange<") or wrapped.offsets.coefficient_of(inner) != Polynomial.of(times=1):
        raise NotProvable("what is wrapped is no range of offsets")
    block = inner.removeprefix("arange<").rpartition(">")[0]
    return _TileAxis(lane, stride, block, wrapped.offsets.without(inner), wrapped.size.text(), wrapped)


def _contiguous_axis(sides: Sequence[_TileAxis], context: RewriteContext) -> int:
    for axis in (1, 0):
        if _known_value(sides[axis].stride, context) == 1:
            return axis
    raise NotProvable("no axis is known to be contiguous")


def _known_value(found: Polynomial, context: RewriteContext) -> int | None:
    """Value of a sum of known scalars; None if one is not known."""
    total = 0
    for product, times in found.terms.items():
        values = [context.value(a) for a in product]
        known = [v for v in values if v is not None]
        if len(known) < len(values):
            return None
        total += times * math.prod(known)
    return total


def _tile_offset(
    side: _TileAxis, left: Polynomial, rooms: list[Polynomial], reader: TileReader
) -> Polynomial:
    """Find where the tile begins along an axis, and where the matrix ends; returns what else is added.

    Takes the conditions of the axis out of `rooms`.
    """
    if side.wrapped is None:
        mine = [r for r in rooms if lane_atoms(r) == [side.lane]]
        room = mine[0] if mine else None
        factors = next(iter(side.stride.terms))
        for product, times in left.terms.items():
            rest = list(product)
            if any(f not in rest for f in factors):
                continue
            for factor in factors:
                rest.remove(factor)
            term = Polynomial.of(*rest, times=times)
            told = room is not None and all(room.terms.get(p) == -t for p, t in term.terms.items())
            if factors or told or (room is None and {side.block, *reader.local} & set(rest)):
                side.offset += term
        if room is not None:
            limit = room + Polynomial.of(side.lane) + side.offset
            if lane_atoms(limit) or limit.atoms() & reader.varying:
                raise NotProvable("the mask's bound moves with the tile")
            side.limit = limit.text()
            rooms.remove(room)
        left -= side.offset * side.stride
    return left


def _load_through_descriptor(
    draft: SourceUnit, facts: FunctionFacts, loop: RangeLoop, tile: _TileLoad, taken: set[str]
) -> None:
    """Make a descriptor before the loop, and load through it."""
    order = (1 - tile.inner, tile.inner)
    sides = [tile.sides[axis] for axis in order]
    name = fresh_name(f"{tile.root}_tiles", taken)
    # What is added to the address counts elements and may need 64 bits, though its factors do not.
    added = tile.base - Polynomial.of(tile.root)
    wide = [
        " * ".join([f"{draft.tl}.cast({times}, {draft.tl}.int64)", *p]) for p, times in added.terms.items()
    ]
    code = (
        f"{name} = {draft.tl}.make_tensor_descriptor({' + '.join([tile.root, *wide])}, "
        f"[{sides[0].limit}, {sides[1].limit}], [{sides[0].stride.text()}, 1], "
        f"[{sides[0].block}, {sides[1].block}])"
    )
    call = draft.twin(tile.access.call)
    new = parse_expression(f"{name}.load([{sides[0].offset.text()}, {sides[1].offset.text()}])")
    swap_expressions(
        draft.twin(loop.node), {id(call): draft.language_call("trans", new) if tile.inner == 0 else new}
    )
    made = parse_statements(code)
    # Best made once, at the top, if nothing in it is computed by the kernel.
    if ({n for s in made for n in names(s)} - {name}) & set(facts.definitions):
        block, node = draft.twin(loop.block), draft.twin(loop.node)
        at = next(i for i, s in enumerate(block) if s is node)
    else:
        block, at = draft.entry.body, docstring_length(draft.entry.body)
    block[at:at] = made
