"""Two bodies for a program: one without masks where its whole tile lies inside, and the one that was there.

A program asks once, with numbers that are the same for all of its lanes.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forecast_harness.authors.triton.analysis.function_facts import FunctionFacts, broadcast_shape
from forecast_harness.authors.triton.analysis.loops import MemoryAccess, accesses, keep_conditions
from forecast_harness.authors.triton.analysis.polynomials import (
    NotProvable,
    Polynomial,
    PolynomialReader,
    mask_conditions,
    positive_form,
)
from forecast_harness.authors.triton.analysis.source_unit import (
    Block,
    SourceUnit,
    assigned_names,
    fresh_name,
    names,
    parse_expression,
    read_names,
    swap_expressions,
)
from forecast_harness.authors.triton.protocol import RewriteContext, SourceEdit


@dataclass(frozen=True)
class _InteriorAccess:
    """An access, and what must be positive for conditions of its mask to hold for all of its elements."""

    access: MemoryAccess
    rooms: tuple[str, ...]
    rest: tuple[ast.expr, ...]
    """The other conditions."""


class _EntryAnalysis:
    """Facts of the entry's numbers before any loop, as far as its text shows them."""

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
        """The number that is positive where a comparison holds for every lane. Raises `NotProvable`."""
        room = positive_form(self.reader, test.value if isinstance(test, ast.Subscript) else test)
        bound, lanes = room, [a for a in room.atoms() if a.startswith("arange<")]
        for lane in lanes:
            times = room.coefficient_of(lane)
            if set(times.terms) != {()}:
                raise NotProvable(f"{lane} is multiplied by {times.text()}")
            bound = bound.without(lane)
            if times.terms[()] < 0:
                bound += times * (self._side(lane) - Polynomial.of(times=1))
        if not lanes:
            raise NotProvable(f"{ast.unparse(test)} asks nothing of the lanes")
        return self.text(bound)

    def _side(self, lane: str) -> Polynomial:
        return self.reader.polynomial(parse_expression(lane.removeprefix("arange<").removesuffix(">")))

    def unmaskable(self, known: Sequence[str]) -> Iterator[_InteriorAccess]:
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
    own = {
        n: fresh_name(f"{n}_interior", taken) for n in dict.fromkeys(assigned_names(plain)) if n not in old
    }
    for n in (n for s in plain for n in ast.walk(s)):
        if isinstance(n, ast.Name):
            n.id = own.get(n.id, n.id)
    body[at:] = [*before, ast.If(parse_expression(test), plain, body[at:])]
    return draft


def _interior_test(rooms: Sequence[str]) -> str:
    return " & ".join(f"({room} > 0)" for room in dict.fromkeys(rooms))


def interior(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """Programs whose whole tile lies inside load and store without masks."""
    reading = _EntryAnalysis(unit, context)
    place = _split_point(unit, [f.access.call for f in reading.unmaskable(sorted(names(unit.tree)))])
    if place is None:
        return
    at, known = place
    unmasked = list(reading.unmaskable(known))
    if not unmasked:
        return
    draft = unit.copy()
    slow = copy.deepcopy(draft.entry.body[at:])
    for one in unmasked:
        keep_conditions(draft.twin(one.access.call), one.access.kind, copy.deepcopy(one.rest))
    plain, draft.entry.body[at:] = draft.entry.body[at:], slow
    loop = any(isinstance(n, ast.For) for s in slow for n in ast.walk(s))
    _branch(draft, at, _interior_test([r for f in unmasked for r in f.rooms]), plain, [])
    yield SourceEdit(draft, "programs whose whole tile lies inside need no masks", 2.0 if loop else 3.0)
