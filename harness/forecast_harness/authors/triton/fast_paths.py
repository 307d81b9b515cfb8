"""Two bodies for a program: a plain one where its whole tile allows that, and the one that was there.

A program asks once, with numbers that are the same for all of its lanes. Programs inside need no masks, and
those whose elements all lie in one row divide once, not once for each element.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from forecast_autotune.records import Config
from forecast_harness.authors.triton.analysis.function_facts import ELEMENTWISE, FunctionFacts
from forecast_harness.authors.triton.analysis.loops import MemoryAccess, accesses, keep_conditions
from forecast_harness.authors.triton.analysis.polynomials import (
    NotProvable,
    Polynomial,
    PolynomialReader,
    mask_conditions,
    positive_form,
)
from forecast_harness.authors.triton.analysis.shapes import broadcast_shape
from forecast_harness.authors.triton.analysis.source_unit import (
    Block,
    SourceUnit,
    assigned_names,
    fresh_name,
    names,
    nodes_in_order,
    parse_expression,
    parse_statements,
    read_names,
    swap_expressions,
)
from forecast_harness.authors.triton.protocol import RewriteContext, SourceEdit

_MAX_DIVISIONS = 3
"""Different divisions that one program asks about; a kernel with more finds itself outside too often."""

_SHAPE_FOLLOWING = ELEMENTWISE | {"arange", "full", "program_id", "zeros"}
"""What takes numbers and blocks alike, or takes neither."""


@dataclass(frozen=True)
class _InteriorAccess:
    """An access, and what must be positive for conditions of its mask to hold for all of its elements."""

    access: MemoryAccess
    rooms: tuple[str, ...]
    rest: tuple[ast.expr, ...]
    """The other conditions."""


@dataclass(frozen=True)
class _Division:
    """A quotient or rest of consecutive numbers."""

    node: ast.BinOp
    begin: str
    """The first of them."""
    side: str
    """How many there are."""
    by: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Divisions with the same key share what is computed for them."""
        return self.begin, self.side, self.by


class _EntryAnalysis:
    """What the entry's text shows of its numbers before any loop."""

    def __init__(self, unit: SourceUnit, context: RewriteContext) -> None:
        self.unit, self.facts = unit, context.facts(unit, unit.entry)
        loops = [n for n in ast.walk(unit.entry) if isinstance(n, ast.For | ast.While)]
        own = self.facts.definitions
        again = {n for n, values in own.items() if len(values) > 1 or n in self.facts.parameters}
        # A name that is assigned more than once means different things in different places.
        varying = frozenset(again.union(*(assigned_names(loop) for loop in loops)))
        self.reader = PolynomialReader(self.facts, varying, 10**9)
        # Sums are read without their conversions: what was 64 bits wide must not overflow now.
        self._wide = "int64" in ast.unparse(unit.entry)

    def text(self, number: Polynomial) -> str:
        """A sum as Python, the same for all lanes. Raises `NotProvable` for one that is not."""
        node = parse_expression(number.text())
        if self.facts.shape(node) != ():
            raise NotProvable(f"{number.text()} is not one number")
        if self._wide:
            wide = {
                id(c): parse_expression(f"{ast.unparse(c)}.to({self.unit.tl}.int64)")
                for c in self.unit.calls(node, "program_id")
            }
            node = swap_expressions(node, wide)
        return ast.unparse(node)

    def positive_condition(self, test: ast.expr) -> str:
        """What is positive where a comparison holds for every lane. Raises `NotProvable`."""
        room = positive_form(self.reader, test.value if isinstance(test, ast.Subscript) else test)
        found, lanes = room, [a for a in room.atoms() if a.startswith("arange<")]
        for lane in lanes:
            times = room.coefficient_of(lane)
            if set(times.terms) != {()}:
                raise NotProvable(f"{lane} is multiplied by {times.text()}")
            found = found.without(lane)
            if times.terms[()] < 0:
                found += times * (self._side(lane) - Polynomial.of(times=1))
        if not lanes:
            raise NotProvable(f"{ast.unparse(test)} asks nothing of the lanes")
        return self.text(found)

    def _side(self, lane: str) -> Polynomial:
        return self.reader.polynomial(parse_expression(lane.removeprefix("arange<").removesuffix(">")))

    def inside(self, known: Sequence[str]) -> Iterator[_InteriorAccess]:
        """Accesses whose mask, or a part of it, holds where numbers of these names are positive."""
        named = {n: v for n in self.facts.definitions if (v := self.facts.single_value(n)) is not None}
        for access in accesses(self.unit, self.unit.entry):
            if not access.plain or access.mask is None or not self._keeps_shape(access):
                continue
            rooms, rest = [], []
            for test in mask_conditions(access.mask, named):
                try:
                    room = self.positive_condition(test)
                except NotProvable:
                    room = ""
                if room and read_names(parse_expression(room)) <= set(known):
                    rooms.append(room)
                else:
                    rest.append(test)
            if rooms:
                yield _InteriorAccess(access, tuple(rooms), tuple(rest))

    def _keeps_shape(self, access: MemoryAccess) -> bool:
        """Whether what is loaded or stored has the same shape without the mask."""
        assert access.mask is not None
        shape, mask = self.facts.shape(access.pointer), self.facts.shape(access.mask)
        return shape is not None and mask is not None and broadcast_shape([shape, mask]) == shape

    def divisions(self, known: Sequence[str]) -> Iterator[_Division]:
        """Quotients and rests of one number for each lane, by a number that is the same for all of them."""
        for node in nodes_in_order(self.unit.entry):
            if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.FloorDiv | ast.Mod):
                continue
            try:
                whole, by = self.reader.polynomial(node.left), self.text(self.reader.polynomial(node.right))
                lanes = [a for a in whole.atoms() if a.startswith("arange<")]
                if len(lanes) != 1 or whole.coefficient_of(lanes[0]) != Polynomial.of(times=1):
                    continue
                side = lanes[0].removeprefix("arange<").removesuffix(">")
                begin = self.text(whole.without(lanes[0]))
            except NotProvable:
                continue
            if read_names([parse_expression(begin), parse_expression(by)]) <= set(known):
                yield _Division(node, begin, side, by)


def _split_point(unit: SourceUnit, nodes: Sequence[ast.AST]) -> tuple[int, list[str]] | None:
    """The first statement that holds one of these, and the names that are known before it.

    None where what follows cannot stand in two branches.
    """
    wanted, body = {id(n) for n in nodes}, unit.entry.body
    at = next((i for i, s in enumerate(body) if any(id(n) in wanted for n in ast.walk(s))), None)
    if at is None or not unit.tl or unit.calls(unit.kernels, "dot", "dot_scaled"):
        return None
    if any(isinstance(n, ast.Return | ast.AnnAssign) for s in body[at:] for n in ast.walk(s)):
        return None
    simple = [s for s in body[:at] if not isinstance(s, ast.If | ast.For | ast.While | ast.With)]
    return at, [
        *FunctionFacts(unit, unit.entry).parameters,
        *unit.constexprs(unit.entry),
        *assigned_names(simple),
        unit.tl,
    ]


def _branch(draft: SourceUnit, at: int, test: str, plain: Block, before: Block) -> SourceUnit:
    """Run a plain body where a test holds; the names that it makes are its own."""
    body, entry = draft.entry.body, draft.entry
    old = set(assigned_names(body[:at])) | set(FunctionFacts(draft, entry).parameters)
    taken = names(entry) | names(plain) | set(draft.functions)
    own = {n: fresh_name(f"{n}_inside", taken) for n in dict.fromkeys(assigned_names(plain)) if n not in old}
    for n in (n for s in plain for n in ast.walk(s)):
        if isinstance(n, ast.Name):
            n.id = own.get(n.id, n.id)
    body[at:] = [*before, ast.If(parse_expression(test), plain, body[at:])]
    return draft


def _interior_test(rooms: Sequence[str]) -> str:
    return " & ".join(f"({room} > 0)" for room in dict.fromkeys(rooms))


def interior_fast_path(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """Programs whose whole tile lies inside load and store without masks."""
    reading = _EntryAnalysis(unit, context)
    place = _split_point(unit, [f.access.call for f in reading.inside(sorted(names(unit.tree)))])
    if place is None:
        return
    at, known = place
    found = list(reading.inside(known))
    if not found:
        return
    draft = unit.copy()
    slow = copy.deepcopy(draft.entry.body[at:])
    for one in found:
        keep_conditions(draft.twin(one.access.call), one.access.kind, copy.deepcopy(one.rest))
    plain, draft.entry.body[at:] = draft.entry.body[at:], slow
    loop = any(isinstance(n, ast.For) for s in slow for n in ast.walk(s))
    _branch(draft, at, _interior_test([r for f in found for r in f.rooms]), plain, [])
    yield SourceEdit(draft, "programs whose whole tile lies inside need no masks", 2.0 if loop else 3.0)


def one_row_fast_path(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """Programs whose elements all lie in one row divide their first number only.

    The quotient is then one number for the whole program, and what is loaded at it is loaded once; addresses
    made of the rest are consecutive, which shows in the text only now.
    """
    reading = _EntryAnalysis(unit, context)
    every = list(reading.divisions(sorted(names(unit.tree))))
    place = _split_point(unit, [d.node for d in every])
    if place is None:
        return
    at, known = place
    found = list(reading.divisions(known))
    keys = list(dict.fromkeys(d.key for d in found))
    body = unit.entry.body
    old = set(assigned_names(body[:at])) | set(reading.facts.parameters)
    compound = (ast.For, ast.While, ast.If, ast.With, ast.Lambda)
    bent = any(isinstance(n, compound) for s in body[at:] for n in ast.walk(s))
    if not found or len(keys) > _MAX_DIVISIONS or bent or old & set(assigned_names(body[at:])):
        return
    inside = list(reading.inside(known))
    taken, tl = names(unit.entry) | set(unit.functions), unit.tl
    rows = {key: (fresh_name("row", taken), fresh_name("begin", taken)) for key in keys}
    draft = unit.copy()
    slow = copy.deepcopy(draft.entry.body[at:])
    new: dict[int, ast.expr] = {}
    for one in found:
        row, begin = rows[one.key]
        text = row if isinstance(one.node.op, ast.FloorDiv) else f"{begin} + {tl}.arange(0, {one.side})"
        new[id(draft.twin(one.node))] = parse_expression(text)
    before, asked = [], []
    for (first, side, by), (row, begin) in rows.items():
        before += parse_statements(f"{row} = ({first}) // ({by})\n{begin} = {first} - {row} * ({by})")
        asked += [f"{first} + 1", f"{by} - {begin} - {side} + 1"]
    swap_expressions(draft.entry, new)
    draft.entry.body[at:at] = before
    if not _shapes_still_fit(reading.facts, FunctionFacts(draft, draft.entry), at, len(before), inside):
        return
    for access in inside:
        keep_conditions(draft.twin(access.access.call), access.access.kind, copy.deepcopy(access.rest))
    asked += [room for one in inside for room in one.rooms]
    plain, draft.entry.body[at:] = draft.entry.body[at + len(before) :], slow
    _branch(draft, at, _interior_test(asked), plain, before)
    configs = _dividing_configs(context, keys)
    yield SourceEdit(draft, "programs inside one row divide once, not for each element", 7.0, configs)


def _shapes_still_fit(
    old: FunctionFacts, new: FunctionFacts, at: int, added: int, inside: Sequence[_InteriorAccess]
) -> bool:
    """Whether everything takes what has become one number where it was a block."""
    bare = {id(one.access.call) for one in inside if not one.rest}
    pairs = zip(old.function.body[at:], new.function.body[at + added :], strict=True)
    return all(_accepts_scalar(old, new, a, b, bare) for a, b in pairs)


def _accepts_scalar(old: FunctionFacts, new: FunctionFacts, a: ast.AST, b: ast.AST, bare: set[int]) -> bool:
    if type(a) is not type(b):
        return True  # what was put in its place
    if isinstance(a, ast.BinOp) and isinstance(b, ast.BinOp) and type(a.op) is not type(b.op):
        return True
    below = list(zip(ast.iter_child_nodes(a), ast.iter_child_nodes(b), strict=True))
    if not all(_accepts_scalar(old, new, x, y, bare) for x, y in below):
        return False
    if isinstance(a, ast.Subscript) and isinstance(b, ast.Subscript):
        return _same_shapes(old, new, [(a.value, b.value)])
    if not isinstance(a, ast.Call) or not isinstance(b, ast.Call):
        return True
    name = old.unit.callee_name(a)
    if name in _SHAPE_FOLLOWING or old.unit.is_library_call(a) or old.unit.method_name(a) == "to":
        return True
    if name == "load" and id(a) in bare and new.shape(b.args[0]) == ():
        return True
    if name == "store":  # a value is spread over a block of addresses, not the other way round
        return _same_shapes(old, new, [(a.args[0], b.args[0])])
    given = zip(
        [*a.args, *(k.value for k in a.keywords)], [*b.args, *(k.value for k in b.keywords)], strict=True
    )
    return _same_shapes(old, new, list(given))


def _same_shapes(old: FunctionFacts, new: FunctionFacts, pairs: Sequence[tuple[ast.expr, ast.expr]]) -> bool:
    """Whether shapes are known, and the same before and after."""
    return all((shape := old.shape(a)) is not None and shape == new.shape(b) for a, b in pairs)


def _dividing_configs(context: RewriteContext, keys: Sequence[tuple[str, str, str]]) -> tuple[Config, ...]:
    """The base's widest configs whose blocks end where rows end; none if all of them do."""
    kept = list(context.configs)
    for _, side, by in keys:
        length = int(by) if by.isdigit() else context.value(by)
        if length is not None:
            kept = [c for c in kept if isinstance(s := dict(c.kwargs).get(side), int) and length % s == 0]
    if len(kept) == len(context.configs):
        return ()
    sides = {side for _, side, _ in keys}
    widest = max((_widths(dict(c.kwargs), sides) for c in kept), default=())
    return tuple(c for c in kept if _widths(dict(c.kwargs), sides) == widest)


def _widths(given: Mapping[str, object], sides: set[str]) -> tuple[int, ...]:
    return tuple(v for side in sorted(sides) if isinstance(v := given.get(side), int))
