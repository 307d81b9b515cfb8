"""Masks left out where they hold for every element: in the long part of a loop, and in programs inside the borders."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forecast_autotune.python_parser import parse_expression
from forecast_harness.authors.triton.analysis.function_facts import (
    FunctionFacts,
    MemoryAccess,
    RangeLoop,
    accesses,
    broadcast_shape,
    keep_conditions,
    loops,
)
from forecast_harness.authors.triton.analysis.polynomials import (
    CounterBound,
    NotProvable,
    Polynomial,
    PolynomialReader,
    counter_bound,
    induction_variables,
    mask_conditions,
    positive_form,
)
from forecast_harness.authors.triton.analysis.source_unit import (
    Block,
    SourceUnit,
    assigned_names,
    every_node,
    fresh_name,
    names,
    parse_statements,
    read_names,
    replace_statement,
    swap_expressions,
)
from forecast_harness.authors.triton.protocol import RewriteContext, SourceEdit


@dataclass(frozen=True)
class _MaskedAccess:
    """An access whose mask has conditions that end with the loop's counter."""

    access: MemoryAccess
    bounds: tuple[tuple[ast.expr, CounterBound | None], ...]
    """Each condition of the mask, with its bound where one can be shown."""

    def holds(self, bound: CounterBound) -> bool:
        return any(b == bound for _, b in self.bounds)

    def rest(self, bound: CounterBound) -> list[ast.expr]:
        return [test for test, b in self.bounds if b != bound]


def _masked_accesses(facts: FunctionFacts, loop: RangeLoop) -> list[_MaskedAccess]:
    body = loop.node.body
    assignments = Counter(assigned_names(body))
    varying = frozenset(assignments) | {loop.counter}
    local: dict[str, Polynomial | None] = {loop.counter: Polynomial.of(loop.counter)}
    reader = PolynomialReader(facts, varying, loop.node.lineno, local)
    local |= induction_variables(reader, loop)
    masks: dict[str, ast.expr] = {}
    results = []
    for statement in body:
        has_block = isinstance(statement, ast.If | ast.For | ast.While | ast.With)
        for access in accesses(facts.unit, statement):
            if access.plain and access.mask is not None and not has_block:
                pairs = [
                    (test, _bound(reader, test, loop.counter)) for test in mask_conditions(access.mask, masks)
                ]
                if any(b is not None for _, b in pairs):
                    results.append(_MaskedAccess(access, tuple(pairs)))
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            parts = assigned_names(statement) + [n for n in names(statement.value) if n in assignments]
            if isinstance(target, ast.Name) and all(assignments[n] <= 1 for n in parts):
                masks[target.id] = statement.value
        reader.assign(statement)
    return results


def _bound(reader: PolynomialReader, test: ast.expr, counter: str) -> CounterBound | None:
    inner = test.value if isinstance(test, ast.Subscript) else test
    try:
        return counter_bound(reader, inner, counter)
    except NotProvable:
        return None


def _is_sum(facts: FunctionFacts, loop: RangeLoop, text: str, second: str) -> bool:
    """Whether two texts are the same sum where the loop begins."""
    reader = PolynomialReader(facts, frozenset(assigned_names(loop.node)), loop.node.lineno)
    try:
        return reader.polynomial(parse_expression(text)) == reader.polynomial(parse_expression(second))
    except NotProvable:
        return False


def _is_count(facts: FunctionFacts, loop: RangeLoop, text: str, limit: str, side: str) -> bool:
    """Whether a text is `cdiv(limit, side)`, perhaps by the name it was given."""
    node: ast.expr | None = parse_expression(text)
    if isinstance(node, ast.Name):
        node = facts.single_value(node.id)
    if not isinstance(node, ast.Call) or len(node.args) != 2 or not ast.unparse(node.func).endswith("cdiv"):
        return False
    first, second = map(ast.unparse, node.args)
    return _is_sum(facts, loop, first, limit) and _is_sum(facts, loop, second, side)


def _split_bounds(
    facts: FunctionFacts, loop: RangeLoop, bound: CounterBound, full: str
) -> tuple[str, str, str]:
    """Statement that computes where the masks stop being all true, end of the long part, begin of the rest.

    `full` is the name to compute. Raises `NotProvable` for loops of another form.
    """
    first, end, step = loop.range_bounds
    limit, side = bound.limit, bound.side
    if facts.shape(parse_expression(limit)):
        raise NotProvable(f"{limit} is not one number")
    size = limit if parse_expression(limit).__class__ is ast.Name else f"max({limit}, 0)"
    if bound.factor == "1" and first == "0" and step == side and _is_sum(facts, loop, end, limit):
        return f"{full} = {size} // {side} * {side}", full, full
    if bound.factor == "1":
        tl = facts.unit.tl
        last = (
            f"{limit} - ({side} - 1)"
            if _is_sum(facts, loop, end, limit)
            else f"min({end}, {limit} - ({side} - 1))"
        )
        rest = f"{first} + {tl}.cdiv(max({full} - ({first}), 0), {step}) * ({step})"
        return f"{full} = {last}", full, rest
    if step != "1":
        raise NotProvable(f"the counter moves by {step}")
    count = f"{size} // {side}"
    if not _is_count(facts, loop, end, limit, side):
        count = f"min({end}, {count})"
    return f"{full} = {count}", full, full if first == "0" else f"max({first}, {full})"


def peel(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """Run the iterations whose masks are all true without masks, then the rest as it was."""
    draft = unit.copy()
    loop_count = dots = 0
    for function in unit.kernels:
        facts = FunctionFacts(unit, function)
        existing = names(function)
        for loop in loops(unit, function):
            if loop.may_exit_early or not loop.innermost or not loop.ascending or _reads_counter(loop):
                continue
            masks = _masked_accesses(facts, loop)
            if not masks:
                continue
            bound = Counter(b for m in masks for _, b in m.bounds if b is not None).most_common(1)[0][0]
            full = fresh_name(f"{loop.counter}_full", existing)
            try:
                compute, end, begin = _split_bounds(facts, loop, bound, full)
            except NotProvable:
                continue
            _split_loop(draft, loop, [m for m in masks if m.holds(bound)], bound, (compute, end, begin))
            loop_count, dots = loop_count + 1, dots + loop.has_dots
    if loop_count:
        count = "the loop" if loop_count == 1 else f"{loop_count} loops"
        yield SourceEdit(
            draft,
            f"{count} without masks as long as tiles are full; the last tile as before",
            4.0 + 2.0 * bool(dots),
        )


def _reads_counter(loop: RangeLoop) -> bool:
    """Whether the counter's last value matters after the loop."""
    rest = [n for n in ast.walk(loop.function) if isinstance(n, ast.For) and n is not loop.node]
    is_overwritten = any(loop.counter in assigned_names(n.target) for n in rest)
    return not is_overwritten and loop.used_after({loop.counter})


def _split_loop(
    draft: SourceUnit,
    loop: RangeLoop,
    masks: list[_MaskedAccess],
    bound: CounterBound,
    where: tuple[str, str, str],
) -> None:
    compute, end, begin = where
    first, stop, step = loop.range_bounds
    node = draft.twin(loop.node)
    tail = copy.deepcopy(node)
    for item in masks:
        rest = [copy.deepcopy(test) for test in item.rest(bound)]
        keep_conditions(draft.twin(item.access.call), item.access.kind, rest)
    assert isinstance(node.iter, ast.Call)
    assert isinstance(tail.iter, ast.Call)
    node.iter.args = [parse_expression(first), parse_expression(end), parse_expression(step)]
    node.iter.keywords = [k for k in node.iter.keywords if k.arg != "step"]
    # The rest is one tile at most: pipelining it would only cost shared memory.
    tail.iter = draft.language_call(
        "range",
        parse_expression(begin),
        parse_expression(stop),
        parse_expression(step),
        num_stages=ast.Constant(1),
    )
    replace_statement(draft.twin(loop.block), node, [*parse_statements(compute), node, tail])


# --- programs ---


@dataclass(frozen=True)
class _InteriorAccess:
    """An access, and the numbers whose being positive shows that conditions of its mask hold everywhere."""

    access: MemoryAccess
    slacks: tuple[str, ...]
    rest: tuple[ast.expr, ...]
    """The other conditions."""


class _EntryAnalysis:
    """Facts of the entry's numbers before any loop, as far as its text shows them."""

    def __init__(self, unit: SourceUnit, context: RewriteContext) -> None:
        self.unit, self.facts = unit, context.facts(unit, unit.entry)
        loops = [n for n in ast.walk(unit.entry) if isinstance(n, ast.For | ast.While)]
        own = self.facts.definitions
        repeats = {n for n, values in own.items() if len(values) > 1 or n in self.facts.parameters}
        # A name that is assigned more than once means different things in different places.
        varying = frozenset(repeats.union(*(assigned_names(loop) for loop in loops)))
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
        slack = positive_form(self.reader, test.value if isinstance(test, ast.Subscript) else test)
        bound, lanes = slack, [a for a in slack.atoms() if a.startswith("arange<")]
        for lane in lanes:
            times = slack.coefficient_of(lane)
            if set(times.terms) != {()}:
                raise NotProvable(f"{lane} is multiplied by {times.text()}")
            bound = bound.without(lane)
            if times.terms[()] < 0:
                side = parse_expression(lane.removeprefix("arange<").removesuffix(">"))
                bound += times * (self.reader.polynomial(side) - Polynomial.of(times=1))
        if not lanes:
            raise NotProvable(f"{ast.unparse(test)} asks nothing of the lanes")
        return self.text(bound)

    def unmaskable(self, known: Sequence[str]) -> Iterator[_InteriorAccess]:
        """Accesses whose mask, or a part of it, holds where numbers of these names are positive."""
        definitions = {n: v for n in self.facts.definitions if (v := self.facts.single_value(n)) is not None}
        for access in accesses(self.unit, self.unit.entry):
            if not access.plain or access.mask is None or not self._keeps_shape(access):
                continue
            slacks, rest = [], []
            for test in mask_conditions(access.mask, definitions):
                try:
                    slack = self.positive_condition(test)
                except NotProvable:
                    slack = ""
                if slack and read_names(parse_expression(slack)) <= set(known):
                    slacks.append(slack)
                else:
                    rest.append(test)
            if slacks:
                yield _InteriorAccess(access, tuple(slacks), tuple(rest))

    def _keeps_shape(self, access: MemoryAccess) -> bool:
        """Whether what is loaded or stored has the same shape without the mask."""
        assert access.mask is not None
        shape, mask = self.facts.shape(access.pointer), self.facts.shape(access.mask)
        return shape is not None and mask is not None and broadcast_shape([shape, mask]) == shape


def _split_point(unit: SourceUnit, nodes: Sequence[ast.AST]) -> tuple[int, list[str]] | None:
    """The first statement that holds one of these, and the names that are known before it.

    None where what follows cannot stand in two branches.
    """
    ids, body = {id(n) for n in nodes}, unit.entry.body
    at = next((i for i, s in enumerate(body) if any(id(n) in ids for n in ast.walk(s))), None)
    if at is None or not unit.tl or unit.calls(unit.kernels, "dot", "dot_scaled"):
        return None
    if any(isinstance(n, ast.Return | ast.AnnAssign) for n in every_node(body[at:])):
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
    existing = names(entry) | names(plain) | set(draft.functions)
    own = {
        n: fresh_name(f"{n}_interior", existing) for n in dict.fromkeys(assigned_names(plain)) if n not in old
    }
    for n in every_node(plain):
        if isinstance(n, ast.Name):
            n.id = own.get(n.id, n.id)
    body[at:] = [*before, ast.If(parse_expression(test), plain, body[at:])]
    return draft


def interior(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """Programs whose whole tile lies inside load and store without masks."""
    reading = _EntryAnalysis(unit, context)
    place = _split_point(unit, [f.access.call for f in reading.unmaskable(sorted(names(unit.tree)))])
    if place is None:
        return
    at, known = place
    interior_accesses = list(reading.unmaskable(known))
    if not interior_accesses:
        return
    draft = unit.copy()
    slow = copy.deepcopy(draft.entry.body[at:])
    for item in interior_accesses:
        keep_conditions(draft.twin(item.access.call), item.access.kind, copy.deepcopy(item.rest))
    plain, draft.entry.body[at:] = draft.entry.body[at:], slow
    loop = any(isinstance(n, ast.For) for n in every_node(slow))
    slacks = dict.fromkeys(slack for item in interior_accesses for slack in item.slacks)
    _branch(draft, at, " & ".join(f"({slack} > 0)" for slack in slacks), plain, [])
    yield SourceEdit(draft, "programs whose whole tile lies inside need no masks", 2.0 if loop else 3.0)
