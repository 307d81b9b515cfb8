"""The order in which programs take their tiles: each is computed exactly once.

The launch grid stays as it is: programs exchange their numbers, inside the kernel. Nothing here applies to kernels
whose programs wait for one another.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from forecast_harness.authors.triton.analysis.function_facts import FunctionFacts, accesses, axis_of
from forecast_harness.authors.triton.analysis.source_unit import (
    SourceUnit,
    assigned_names,
    docstring_length,
    fresh_name,
    names,
    nodes_in_order,
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
    ids: dict[int, list[ast.Call]] = {}
    for call in unit.calls(unit.entry, "program_id"):
        ids.setdefault(axis_of(call), []).append(call)
    return ids


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


def _taken_names(unit: SourceUnit) -> set[str]:
    return names(unit.entry) | set(unit.functions)


def group(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """Take the tiles of a 2-D grid in bands of eight, so that both operands stay in L2."""
    ids = exchangeable_program_ids(unit)
    if ids is None or not (unit.calls(unit.kernels, "dot", "dot_scaled") or _has_crossed_loads(unit)):
        return
    if {0, 1} <= set(ids):
        yield from _group_axes(unit)
    elif 0 in ids and 1 not in ids:
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
    quotients = _quotients(unit)
    for at, statement in enumerate(unit.entry.body):
        inside = set(ast.walk(statement))
        here = [pair for kind in quotients for node, pair in quotients[kind] if node in inside]
        if not here:
            continue
        (number, width), later = here[0], unit.entry.body[at:]
        both = all((number, width) in [pair for _, pair in quotients[kind]] for kind in quotients)
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


def _quotients(unit: SourceUnit) -> dict[type[ast.operator], list[tuple[ast.AST, tuple[str, str]]]]:
    """Where the program's number is divided, and the rest taken: name and divisor. Empty if grouped."""
    facts = FunctionFacts(unit, unit.entry)
    quotients: dict[type[ast.operator], list[tuple[ast.AST, tuple[str, str]]]] = {
        ast.FloorDiv: [],
        ast.Mod: [],
    }
    for n in nodes_in_order(unit.entry):
        if not isinstance(n, ast.BinOp) or not isinstance(n.op, ast.FloorDiv | ast.Mod):
            continue
        if "pid 0" in facts.sources(n.right):  # the last group is smaller: this kernel groups by itself
            return {ast.FloorDiv: [], ast.Mod: []}
        value = facts.single_value(n.left.id) if isinstance(n.left, ast.Name) else None
        if value is not None and unit.callee_name(value) == "program_id" and isinstance(n.left, ast.Name):
            quotients[type(n.op)].append((n, (n.left.id, ast.unparse(n.right))))
    return quotients
