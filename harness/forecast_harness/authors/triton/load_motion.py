"""Move loads: out of loops that they do not depend on, and up to where their address is known."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from forecast_harness.authors.triton.analysis.function_facts import FunctionFacts
from forecast_harness.authors.triton.analysis.loops import (
    MemoryAccess,
    RangeLoop,
    accesses,
    all_accesses_known,
    always_executes,
    loops,
)
from forecast_harness.authors.triton.analysis.source_unit import (
    Block,
    SourceUnit,
    assigned_names,
    blocks,
    fresh_name,
    names,
    parse_expression,
    read_names,
    swap_expressions,
)
from forecast_harness.authors.triton.protocol import RewriteContext, SourceEdit

_REDUCE = ("sum", "max", "min", "argmax", "argmin", "reduce", "cumsum", "associative_scan", "sort", "softmax")
_BRANCHES = (ast.If, ast.While, ast.For, ast.With)


def hoist(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """Load before a loop what every iteration loads from the same address.

    A loop that does not run at all loads nothing, so the load before it is masked by `first < end`.
    """
    draft, moved = unit.copy(), 0
    for function in unit.kernels:
        facts, taken = FunctionFacts(unit, function), names(function)
        for loop in loops(unit, function):
            if not loop.ascending or loop.may_exit_early or not all_accesses_known(unit, loop.node.body):
                continue
            for access in _invariant_loads(facts, loop):
                name = fresh_name("held", taken)
                call = draft.twin(access.call)
                block, node = draft.twin(loop.block), draft.twin(loop.node)
                swap_expressions(node, {id(call): ast.Name(name, ast.Load())})
                _mask_by_trip(draft, call, access, loop)
                at = next(i for i, s in enumerate(block) if s is node)
                block.insert(at, ast.Assign([ast.Name(name, ast.Store())], call))
                moved += 1
    if moved:
        count = "a load that does" if moved == 1 else f"{moved} loads that do"
        yield SourceEdit(draft, f"{count} not depend on the iteration made once, before the loop", 4.0)


def _invariant_loads(facts: FunctionFacts, loop: RangeLoop) -> list[MemoryAccess]:
    body = loop.node.body
    if "other" in facts.unit.effects(body):
        return []
    changing = set(assigned_names(loop.node))
    found = accesses(facts.unit, body)
    written = [facts.root_parameters(a.pointer) for a in found if a.kind != "load"]
    top = {
        id(a.call)
        for s in body
        if not isinstance(s, _BRANCHES)
        for a in accesses(facts.unit, s)
        if always_executes(s, a.call)
    }
    kept = []
    for access in found:
        roots = facts.root_parameters(access.pointer)
        if (
            access.kind != "load"
            or not access.plain
            or id(access.call) not in top
            or read_names(access.call) & changing
        ):
            continue
        if facts.unit.effects(ast.Tuple([access.pointer, *access.call.args[1:]])) or roots is None:
            continue
        # A scalar mask serves a scalar load only: one mask for a block would have to know its shape.
        maskable = access.mask is not None or facts.shape(access.pointer) == ()
        if maskable and not any(w is None or w & roots for w in written):
            kept.append(access)
    return kept


def _mask_by_trip(unit: SourceUnit, call: ast.Call, access: MemoryAccess, loop: RangeLoop) -> None:
    """Mask a load by whether the loop runs; its address is valid only then."""
    first, end, _ = loop.range_bounds
    if first.isdigit() and end.isdigit() and int(first) < int(end):
        return
    runs = parse_expression(f"({first}) < ({end})")
    if access.mask is None:
        call.keywords.append(ast.keyword("mask", runs))
        return
    # `mask & runs`, in a form that the interpreter computes right for a block and a scalar.
    if len(call.args) > 1:
        call.args[1] = unit.language_call("where", runs, call.args[1], ast.Constant(False))
    else:
        given = next(k for k in call.keywords if k.arg == "mask")
        given.value = unit.language_call("where", runs, given.value, ast.Constant(False))


def load_early(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """Issue loads before the reductions that stand above them, instead of waiting for those first."""
    draft, moved = unit.copy(), 0
    for function in draft.kernels:
        taken = names(function)
        for block in list(blocks(function)):
            moved += _move_loads_up(draft, block, taken)
    if moved:
        count = "a load is" if moved == 1 else f"{moved} loads are"
        yield SourceEdit(draft, f"{count} issued before the reductions above, which then hide the wait", 4.0)


def _move_loads_up(unit: SourceUnit, block: Block, taken: set[str]) -> int:
    moved, at = 0, 0
    while at < len(block):
        statement = block[at]
        if not isinstance(statement, _BRANCHES) and not isinstance(statement, ast.AugAssign):
            for access in [a for a in accesses(unit, statement) if a.kind == "load" and a.plain]:
                place = _earliest_place(unit, block, at, access.call)
                if place is None or not always_executes(statement, access.call):
                    continue
                name = fresh_name("early", taken)
                swap_expressions(statement, {id(access.call): ast.Name(name, ast.Load())})
                block.insert(place, ast.Assign([ast.Name(name, ast.Store())], access.call))
                moved, at = moved + 1, at + 1
        at += 1
    return moved


def _earliest_place(unit: SourceUnit, block: Block, at: int, call: ast.Call) -> int | None:
    """The earliest place in a block for a load; None where that gains nothing."""
    inside = set().union(*(unit.effects(a) for a in [*call.args, *(k.value for k in call.keywords)]))
    if inside:
        return None
    needed, place = read_names(call), at
    while place > 0:
        above = block[place - 1]
        if needed & set(assigned_names(above)) or unit.effects(above) - {"load"} or _may_exit(above):
            break
        place -= 1
    crossed = block[place:at]
    gains = any(unit.calls(s, *_REDUCE) or unit.helper_calls(s) for s in crossed)
    return place if gains and not all(isinstance(s, _BRANCHES) for s in crossed) else None


def _may_exit(statement: ast.stmt) -> bool:
    leaving = (ast.Return, ast.Break, ast.Continue, ast.Assert)
    return any(isinstance(n, leaving) for n in ast.walk(statement))
