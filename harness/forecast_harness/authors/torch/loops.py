"""Loops of the host: what does not change leaves them, rows are taken many at a time."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence

from forecast_harness.authors.torch.rules import term_of
from forecast_harness.authors.torch.source_code import (
    FunctionScope,
    InputFacts,
    ParsedSource,
    TorchEdit,
    is_arithmetic,
    is_pure,
    root_name,
    statement_lists,
)
from forecast_harness.authors.triton.analysis.source_unit import (
    assigned_names,
    fresh_name,
    names,
    nodes_in_order,
    parse_expression,
    parse_statements,
    read_names,
    replace_statement,
    swap_expressions,
)

_POINTWISE_OPERATIONS = frozenset(
    (
        "exp",
        "exp2",
        "log",
        "log2",
        "sqrt",
        "rsqrt",
        "sigmoid",
        "tanh",
        "relu",
        "abs",
        "neg",
        "square",
        "float",
    )
) | {"reciprocal", "F.silu"}
DEFAULT_ROWS = 64
"""First guess at rows per pass; a constant that is tuned afterwards."""


def hoist_invariants(code: ParsedSource, facts: InputFacts) -> Iterator[TorchEdit]:
    """Expressions that are the same in every pass are evaluated once, before the loop."""
    for function in code.functions:
        scope = FunctionScope(code, function)
        for loop in _loops_of(function):
            found = _invariant_expressions(loop, scope)
            for some in [[one] for one in found] + ([found] if len(found) > 1 else []):
                yield _evaluate_before_loop(code, function, loop, [(list(same), same[0]) for same in some])


def hoist_pointwise(code: ParsedSource, facts: InputFacts) -> Iterator[TorchEdit]:
    """`exp(x[part])` in a loop becomes a part of `exp(x)`, worked out for all parts at once."""
    for function in code.functions:
        scope = FunctionScope(code, function)
        for loop in _loops_of(function):
            changed = _changed_names(loop)
            for node in nodes_in_order(loop):
                if not isinstance(node, ast.Call):
                    continue
                form = term_of(node, code.modules)
                if form.head not in _POINTWISE_OPERATIONS or len(form.parts) != 1:
                    continue
                (inner,) = form.parts
                whole = inner.node.value if isinstance(inner.node, ast.Subscript) else None
                if not isinstance(whole, ast.Name) or whole.id in changed or scope.scalar(whole):
                    continue
                every: ast.expr = copy.deepcopy(node)
                twins = {ast.dump(n): n for n in ast.walk(every) if isinstance(n, ast.Subscript)}
                at = twins[ast.dump(inner.node)]
                every = swap_expressions(ast.Expression(every), {id(at): copy.deepcopy(whole)}).body
                yield _evaluate_before_loop(code, function, loop, [([node], every)], inner.node)


def batch_rows(code: ParsedSource, facts: InputFacts) -> Iterator[TorchEdit]:
    """`for i in range(n)` over single rows takes `DEFAULT_ROWS` of them in each pass."""
    for function in code.functions:
        for loop in _loops_of(function):
            if not isinstance(loop, ast.For) or not _is_row_loop(loop, function):
                continue
            draft = code.copy()
            twin = draft.twin(loop)
            assert isinstance(twin.target, ast.Name)
            assert isinstance(twin.iter, ast.Call)
            taken = names(draft.tree)
            constant = fresh_name("ROWS", taken)
            index = twin.target.id
            part = parse_expression(f"slice({index}, {index} + {constant})")
            places = [n for s in twin.body for n in ast.walk(s) if isinstance(n, ast.Name) and n.id == index]
            swap_expressions(twin, {id(n): copy.deepcopy(part) for n in places})
            limit = twin.iter.args[-1]
            twin.iter.args = [ast.Constant(0), limit, ast.Name(constant, ast.Load())]
            lists = {name for s in twin.body for n in ast.walk(s) if (name := _appended_list(n))}
            for node in ast.walk(draft.tree):
                joins = isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.stack"
                if isinstance(node, ast.Call) and joins and root_name(node.args[0]) in lists:
                    node.func = parse_expression("torch.cat")
            insert_definition(draft.tree, f"{constant} = {DEFAULT_ROWS}")
            yield TorchEdit(draft.text(), f"rows are taken {constant} at a time")


def _loops_of(function: ast.FunctionDef) -> Iterator[ast.For | ast.While]:
    for block in statement_lists(function):
        for statement in block:
            if isinstance(statement, ast.For | ast.While):
                yield statement


def _changed_names(loop: ast.For | ast.While) -> set[str]:
    """Names that a pass of a loop gives another value, or writes to."""
    found = set(assigned_names(loop))
    for node in ast.walk(loop):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            found.add(root_name(node.value))
        elif isinstance(node, ast.AugAssign):
            found.add(root_name(node.target))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr.endswith("_") or node.func.attr in ("append", "extend", "pop"):
                found.add(root_name(node.func.value))
            found |= {root_name(k.value) for k in node.keywords if k.arg == "out"}
    return found


def _invariant_expressions(loop: ast.For | ast.While, scope: FunctionScope) -> list[list[ast.expr]]:
    """The largest expressions in a loop that are the same in every pass, equal ones together."""
    changed = _changed_names(loop)
    modules = set(scope.code.modules)
    found: dict[str, list[ast.expr]] = {}

    def visit(node: ast.AST) -> None:
        movable = isinstance(node, ast.Call) or is_arithmetic(node)
        if movable and isinstance(node, ast.expr) and not isinstance(getattr(node, "ctx", None), ast.Store):
            used = read_names(node)
            if used - modules and not used & changed and is_pure(node) and not scope.scalar(node):
                found.setdefault(ast.dump(node), []).append(node)
                return
        for child in ast.iter_child_nodes(node):
            visit(child)

    for statement in loop.body:
        visit(statement)
    return list(found.values())


def _evaluate_before_loop(
    code: ParsedSource,
    function: ast.FunctionDef,
    loop: ast.stmt,
    moved: Sequence[tuple[list[ast.expr], ast.expr]],
    part: ast.expr | None = None,
) -> TorchEdit:
    """A copy in which expressions are evaluated before a loop; of `part`, its index stays in the loop."""
    draft = code.copy()
    taken = names(draft.tree)
    twin_loop = draft.twin(loop)
    new: list[ast.stmt] = []
    swaps: dict[int, ast.expr] = {}
    for places, value in moved:
        name = fresh_name("ready", taken)
        new.append(ast.Assign([ast.Name(name, ast.Store())], copy.deepcopy(value)))
        instead: ast.expr = ast.Name(name, ast.Load())
        if isinstance(part, ast.Subscript):
            instead = ast.Subscript(instead, copy.deepcopy(part.slice), ast.Load())
        swaps |= {id(draft.twin(p)): copy.deepcopy(instead) for p in places}
    block = next(b for b in statement_lists(draft.twin(function)) if any(s is twin_loop for s in b))
    swap_expressions(twin_loop, swaps)
    replace_statement(block, twin_loop, [*new, twin_loop])
    return TorchEdit(draft.text(), "worked out once, before the loop")


def _is_row_loop(loop: ast.For, function: ast.FunctionDef) -> bool:
    """Whether every pass handles one row by itself: its index only picks rows, nothing is carried over."""
    call = loop.iter
    if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "range" and not loop.orelse):
        return False
    first_is_zero = len(call.args) == 1 or (
        len(call.args) == 2 and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0
    )
    if not first_is_zero or not isinstance(loop.target, ast.Name):
        return False
    index = loop.target.id
    picks = 0
    for statement in loop.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Subscript):
                first = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
                picks += isinstance(first, ast.Name) and first.id == index
            if isinstance(node, ast.Break | ast.Continue | ast.Return | ast.AugAssign | ast.If | ast.For):
                return False
    uses = sum(isinstance(n, ast.Name) and n.id == index for s in loop.body for n in ast.walk(s))
    made = {n for s in loop.body for n in assigned_names(s)}
    inside = {id(n) for n in ast.walk(loop)}
    later = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and id(n) not in inside}
    return picks > 0 and picks == uses and not made & later


def _appended_list(node: ast.AST) -> str:
    """The list that a call appends to; empty for anything else."""
    call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append"
    return root_name(node) if call and isinstance(node, ast.expr) else ""


def insert_definition(tree: ast.Module, text: str) -> None:
    """Put statements after a module's imports and docstring."""
    last = [i for i, s in enumerate(tree.body) if isinstance(s, ast.Import | ast.ImportFrom)]
    at = last[-1] + 1 if last else int(ast.get_docstring(tree) is not None)
    tree.body[at:at] = parse_statements(text)
