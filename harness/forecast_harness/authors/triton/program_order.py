"""The order in which programs take their tiles: a permutation, so each tile is computed exactly once.

The launch grid stays as it is; programs exchange their numbers, inside the kernel. Nothing here applies
to kernels whose programs wait for one another.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from forecast_harness.authors.triton.analysis.function_facts import FunctionFacts
from forecast_harness.authors.triton.analysis.loops import accesses, loops
from forecast_harness.authors.triton.analysis.shapes import axis_of
from forecast_harness.authors.triton.analysis.source_unit import (
    Block,
    SourceUnit,
    arguments,
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

GROUP_SIZE = 8
"""Tiles of one group, as in Triton's tutorial."""


def exchangeable_program_ids(unit: SourceUnit) -> dict[int, list[ast.Call]] | None:
    """`program_id` calls of the entry by axis; None where programs may not exchange their numbers."""
    if any(isinstance(n, ast.While) for f in unit.kernels for n in ast.walk(f)):
        return None  # a lock, perhaps
    for function in unit.kernels:
        own = unit.calls(function, "program_id", "num_programs")
        waits = unit.calls(function, "atomic_cas", "atomic_xchg", "debug_barrier")
        if waits or (own and function is not unit.entry) or any(axis_of(c) < 0 for c in own):
            return None
        if unit.calls(function, "num_programs"):
            return None
    found: dict[int, list[ast.Call]] = {}
    for call in unit.calls(unit.entry, "program_id"):
        found.setdefault(axis_of(call), []).append(call)
    return found


def _renumber(unit: SourceUnit, code: str, new: dict[int, str]) -> SourceUnit:
    """A copy with statements in front, and names in the place of `program_id` calls by axis."""
    draft = unit.copy()
    entry = draft.entry
    calls = unit.calls(unit.entry, "program_id")
    swap_expressions(
        entry, {id(draft.twin(c)): ast.Name(new[axis_of(c)], ast.Load()) for c in calls if axis_of(c) in new}
    )
    entry.body[docstring_length(entry.body) : docstring_length(entry.body)] = parse_statements(code)
    return draft


def docstring_length(body: Block) -> int:
    """How many statements of a body are its docstring: 0 or 1."""
    first = body[0]
    return int(isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant))


def _taken_names(unit: SourceUnit) -> set[str]:
    return names(unit.entry) | set(unit.functions)


def reverse(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """Start with the last tile along axes on which a loop's length depends: the longest work first."""
    found = exchangeable_program_ids(unit)
    if not found:
        return
    ends = _range_dependencies(unit)
    for axis in sorted(found):
        if any(f"pid {axis}" in end - start for start, end in ends):
            name = fresh_name(f"last_{axis}", _taken_names(unit))
            code = f"{name} = {unit.tl}.num_programs({axis}) - 1 - {unit.tl}.program_id({axis})"
            note = f"programs along axis {axis} in reverse, so that long loops do not start last"
            yield SourceEdit(_renumber(unit, code, {axis: name}), note, 3.0)


def _range_dependencies(unit: SourceUnit) -> list[tuple[frozenset[str], frozenset[str]]]:
    """What the first value and the end of each loop depend on, in the entry and in helpers it calls."""
    facts = FunctionFacts(unit, unit.entry)
    found = []
    for loop in loops(unit, unit.entry):
        first, end, _ = loop.range_bounds
        found.append((facts.sources(parse_expression(first)), facts.sources(parse_expression(end))))
    for call in unit.helper_calls(unit.entry):
        assert isinstance(call.func, ast.Name)
        helper = unit.functions[call.func.id]
        inner = FunctionFacts(unit, helper)
        given = {a.arg: facts.sources(v) for a, v in zip(arguments(helper), call.args, strict=False)}
        given |= {k.arg: facts.sources(k.value) for k in call.keywords if k.arg}
        for loop in loops(unit, helper):
            first, end, _ = loop.range_bounds
            pair = [
                frozenset[str]().union(
                    *(given.get(n, frozenset()) for n in inner.sources(parse_expression(text)))
                )
                for text in (first, end)
            ]
            found.append((pair[0], pair[1]))
    return found


def exchange(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """Let the second grid axis vary fastest instead of the first."""
    found = exchangeable_program_ids(unit)
    if found is None or not {0, 1} <= set(found):
        return
    tl, taken = unit.tl, _taken_names(unit)
    place, first, second = (
        fresh_name("place", taken),
        fresh_name("tile_0", taken),
        fresh_name("tile_1", taken),
    )
    code = (
        f"{place} = {tl}.program_id(0) + {tl}.program_id(1) * {tl}.num_programs(0)\n"
        f"{first} = {place} // {tl}.num_programs(1)\n{second} = {place} % {tl}.num_programs(1)"
    )
    note = "neighbouring programs differ in the second axis: other tiles share the cache"
    yield SourceEdit(_renumber(unit, code, {0: first, 1: second}), note, 2.0)


def group(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """Take the tiles of a 2-D grid in bands of eight, so that both operands stay in L2."""
    found = exchangeable_program_ids(unit)
    if found is None or not (unit.calls(unit.kernels, "dot", "dot_scaled") or _has_crossed_loads(unit)):
        return
    if {0, 1} <= set(found):
        yield from _group_axes(unit)
    elif 0 in found and 1 not in found:
        yield from _group_split(unit)


def _has_crossed_loads(unit: SourceUnit) -> bool:
    """Whether some loads depend on the first axis only and others on the second only."""
    facts = FunctionFacts(unit, unit.entry)
    seen = [facts.sources(a.pointer) for a in accesses(unit, unit.entry) if a.kind == "load"]
    first = any("pid 0" in s and "pid 1" not in s for s in seen)
    return first and any("pid 1" in s and "pid 0" not in s for s in seen)


def _group_axes(unit: SourceUnit) -> Iterator[SourceEdit]:
    for slow, promise in ((1, 4.0), (0, 3.0)):
        fast, tl, taken = 1 - slow, unit.tl, _taken_names(unit)
        place, band, top, rows = (fresh_name(n, taken) for n in ("place", "band", "band_top", "band_rows"))
        tiles = {axis: fresh_name(f"tile_{axis}", taken) for axis in (0, 1)}
        code = (
            f"{place} = {tl}.program_id(0) + {tl}.program_id(1) * {tl}.num_programs(0)\n"
            f"{band} = {GROUP_SIZE} * {tl}.num_programs({fast})\n"
            f"{top} = {place} // {band} * {GROUP_SIZE}\n"
            f"{rows} = min({tl}.num_programs({slow}) - {top}, {GROUP_SIZE})\n"
            f"{tiles[slow]} = {top} + {place} % {band} % {rows}\n"
            f"{tiles[fast]} = {place} % {band} // {rows}"
        )
        note = f"tiles in bands of {GROUP_SIZE} along axis {slow}, so that what programs share stays in L2"
        yield SourceEdit(_renumber(unit, code, tiles), note, promise)


def _group_split(unit: SourceUnit) -> Iterator[SourceEdit]:
    """One axis that the kernel splits by `//` and `%`: permute its number before it is split.

    Whole bands are permuted; the programs after the last whole row keep their number.
    """
    found = _quotients(unit)
    for at, statement in enumerate(unit.entry.body):
        here = [pair for kind in found for node, pair in found[kind] if _is_within(node, statement)]
        if not here:
            continue
        (number, width), later = here[0], unit.entry.body[at:]
        both = all((number, width) in [pair for _, pair in found[kind]] for kind in found)
        if (
            not both
            or number in assigned_names(later)
            or any(number in read_names(s) for s in unit.entry.body[:at])
        ):
            return
        draft, taken, tl = unit.copy(), _taken_names(unit), unit.tl
        rows, band, top, tall = (fresh_name(n, taken) for n in ("full_rows", "band", "band_top", "band_rows"))
        code = (
            f"{rows} = {tl}.num_programs(0) // ({width})\n"
            f"{band} = {GROUP_SIZE} * ({width})\n"
            f"{top} = {number} // {band} * {GROUP_SIZE}\n"
            f"{tall} = max(min({rows} - {top}, {GROUP_SIZE}), 1)\n"
            f"{number} = {tl}.where({number} < {rows} * ({width}), "
            f"({top} + {number} % {band} % {tall}) * ({width}) + {number} % {band} // {tall}, {number})"
        )
        draft.entry.body[at:at] = parse_statements(code)
        note = f"tiles in bands of {GROUP_SIZE} rows, so that what programs share stays in L2"
        yield SourceEdit(draft, note, 5.0)
        return


def _is_within(node: ast.AST, statement: ast.stmt) -> bool:
    return any(n is node for n in ast.walk(statement))


def _quotients(unit: SourceUnit) -> dict[type[ast.operator], list[tuple[ast.AST, tuple[str, str]]]]:
    """Where the program's number is divided, and the rest taken: name and divisor. Empty if grouped."""
    facts = FunctionFacts(unit, unit.entry)
    found: dict[type[ast.operator], list[tuple[ast.AST, tuple[str, str]]]] = {ast.FloorDiv: [], ast.Mod: []}
    for n in nodes_in_order(unit.entry):
        if not isinstance(n, ast.BinOp) or not isinstance(n.op, ast.FloorDiv | ast.Mod):
            continue
        if "pid 0" in facts.sources(n.right):  # the last group is smaller: this kernel groups by itself
            return {ast.FloorDiv: [], ast.Mod: []}
        value = facts.single_value(n.left.id) if isinstance(n.left, ast.Name) else None
        if value is not None and unit.callee_name(value) == "program_id" and isinstance(n.left, ast.Name):
            found[type(n.op)].append((n, (n.left.id, ast.unparse(n.right))))
    return found
