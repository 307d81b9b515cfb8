"""Split the sum of a dot loop over several programs, which add their parts in memory."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from forecast_harness.authors.triton.analysis.function_facts import FunctionFacts
from forecast_harness.authors.triton.analysis.loops import (
    MemoryAccess,
    RangeLoop,
    accesses,
    all_accesses_known,
    loops,
)
from forecast_harness.authors.triton.analysis.polynomials import PolynomialReader, induction_variables
from forecast_harness.authors.triton.analysis.shapes import argument
from forecast_harness.authors.triton.analysis.source_unit import (
    SourceUnit,
    assigned_names,
    fresh_name,
    names,
    parse_expression,
    parse_statements,
    read_names,
)
from forecast_harness.authors.triton.program_order import exchangeable_program_ids
from forecast_harness.authors.triton.protocol import RewriteContext, SourceEdit

SPLIT_COUNTS = (4, 2)


def split_sum(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """Programs along one more grid axis each take a part of the loop and add it to the result.

    Only where the result is known to be float32 and is nothing but the sum: a bias would be added by every
    part, and an activation of parts is not the activation of their sum.
    """
    axes = exchangeable_program_ids(unit)
    dots = [loop for loop in loops(unit, unit.entry) if loop.has_dots]
    if not axes or max(axes) > 1 or "grid" in unit.functions or len(dots) != 1:
        return
    loop, facts = dots[0], FunctionFacts(unit, unit.entry)
    stores = [a for a in accesses(unit, unit.entry) if a.kind != "load"]
    top = loop.block is unit.entry.body and all_accesses_known(unit, unit.entry.body)
    if not top or len(stores) != 1 or not loop.innermost or loop.may_exit_early or not loop.ascending:
        return
    roots = facts.root_parameters(stores[0].pointer)
    if roots is None or len(roots) != 1 or context.dtype(next(iter(roots))) != "float32":
        return
    moved = moved_offsets(facts, loop)
    total = _accumulator(unit, loop, moved)
    if total is None or not _stores_only_sum(unit, facts, loop, stores[0], total):
        return
    for place, parts in enumerate(SPLIT_COUNTS):
        draft = _split(unit, loop, stores[0], moved, max(axes) + 1, parts, next(iter(roots)))
        yield SourceEdit(draft, f"{parts} programs share each sum and add their parts in memory", 3.0 - place)


def _accumulator(unit: SourceUnit, loop: RangeLoop, moved: Collection[str]) -> str | None:
    """The accumulator: the one name besides moving offsets that an iteration hands to the next."""
    carried = loop.carried_names.difference(moved)
    if len(carried) != 1:
        return None
    (total,) = carried
    adds = adding_statement(loop, total)
    return total if adds is not None and adds_in_place(unit, adds, total) else None


def moved_offsets(facts: FunctionFacts, loop: RangeLoop) -> frozenset[str]:
    """Names that a loop moves by the same amount in every iteration."""
    reader = PolynomialReader(facts, frozenset(assigned_names(loop.node)), loop.node.lineno)
    return frozenset(induction_variables(reader, loop))


def adding_statement(loop: RangeLoop, name: str) -> ast.stmt | None:
    """The one statement of an iteration that assigns a name and reads it; None where others do either."""
    adds = [s for s in loop.node.body if name in assigned_names(s)]
    reads = sum(name in read_names(s) for s in loop.node.body)
    return adds[0] if len(adds) == 1 and reads == 1 else None


def adds_in_place(unit: SourceUnit, statement: ast.stmt, name: str) -> bool:
    """Whether a statement adds to a name what does not depend on it, by `+=` or as a dot's accumulator."""
    if isinstance(statement, ast.AugAssign):
        return isinstance(statement.op, ast.Add) and name not in read_names(statement.value)
    value = statement.value if isinstance(statement, ast.Assign) else None
    if not isinstance(value, ast.Call) or unit.callee_name(value) != "dot":
        return False
    into = argument(value, 2, "acc")
    rest = [a for a in (*value.args, *(k.value for k in value.keywords)) if a is not into]
    return isinstance(into, ast.Name) and into.id == name and all(name not in read_names(a) for a in rest)


def _stores_only_sum(
    unit: SourceUnit, facts: FunctionFacts, loop: RangeLoop, store: MemoryAccess, total: str
) -> bool:
    """Whether the sum begins at zero, and what is stored is the sum, at most converted to another type."""
    before = [v for v in facts.definitions.get(total, []) if v is not None and unit.callee_name(v) == "zeros"]
    others = [s for s in loop.block if total in assigned_names(s) and s is not loop.node]
    value = argument(store.call, 1, "value")
    while (
        isinstance(value, ast.Call)
        and unit.method_name(value) == "to"
        and isinstance(value.func, ast.Attribute)
    ):
        value = value.func.value
    while isinstance(value, ast.Name) and value.id != total:
        found = facts.single_value(value.id)
        converts = isinstance(found, ast.Call) and unit.method_name(found) == "to"
        value = found.func.value if converts and isinstance(found.func, ast.Attribute) else found  # type: ignore[union-attr]
    alone = isinstance(value, ast.Name) and value.id == total
    statement = [s for s in loop.block if isinstance(s, ast.Expr) and s.value is store.call]
    return len(before) == 1 and len(others) == 1 and alone and len(statement) == 1


def run_from(node: ast.For, loop: RangeLoop, skipped: str, stop: str) -> None:
    """Have a loop's copy begin after so many iterations, and end at `stop`."""
    first, _, step = loop.range_bounds
    assert isinstance(node.iter, ast.Call)
    node.iter.args = list(map(parse_expression, (f"{first} + {skipped} * ({step})", stop, step)))
    node.iter.keywords = [k for k in node.iter.keywords if k.arg != "step"]


def move_to_part(loop: RangeLoop, moved: Collection[str], skipped: str) -> list[str]:
    """Statements that move the loop's offsets by the iterations that a program skips."""
    return [
        f"{ast.unparse(statement.target)} += ({ast.unparse(statement.value)}) * {skipped}"
        for statement in loop.node.body
        if isinstance(statement, ast.AugAssign) and set(assigned_names(statement)) <= set(moved)
    ]


def _split(
    unit: SourceUnit,
    loop: RangeLoop,
    store: MemoryAccess,
    moved: Collection[str],
    axis: int,
    parts: int,
    root: str,
) -> SourceUnit:
    draft, taken, tl = unit.copy(), names(unit.entry) | set(unit.functions), unit.tl
    first, end, step = loop.range_bounds
    skipped, each, stop = (fresh_name(n, taken) for n in ("skipped", "each", "stop"))
    code = [
        f"{each} = {tl}.cdiv({tl}.cdiv({end} - ({first}), {step}), {parts})",
        f"{skipped} = {tl}.program_id({axis}) * {each}",
        f"{stop} = min({end}, {first} + ({skipped} + {each}) * ({step}))",
    ]
    code += move_to_part(loop, moved, skipped)
    node, block = draft.twin(loop.node), draft.twin(loop.block)
    run_from(node, loop, skipped, stop)
    at = next(i for i, s in enumerate(block) if s is node)
    block[at:at] = parse_statements("\n".join(code))
    call = draft.twin(store.call)
    call.func = parse_expression(f"{tl}.atomic_add")
    call.keywords = [k for k in call.keywords if k.arg in ("value", "mask")]
    for keyword in call.keywords:
        keyword.arg = "val" if keyword.arg == "value" else keyword.arg
    call.keywords.append(ast.keyword("sem", ast.Constant("relaxed")))
    shape = ", ".join([*["first", "second"][:axis], str(parts)])
    draft.tree.body += parse_statements(
        f"RESET_TO_ZERO = ['{root}']\n\n"
        f"def grid(meta, arguments, base):\n    first, second = (*base, 1)[:2]\n    return ({shape},)"
    )
    return draft
