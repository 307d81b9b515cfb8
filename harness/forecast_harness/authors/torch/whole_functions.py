"""Rewrites of whole functions: no record for gradients, nothing worked out twice."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from forecast_harness.authors.torch.protocol import InputFacts, TorchEdit
from forecast_harness.authors.torch.source_code import FunctionScope, ParsedSource, is_arithmetic, is_pure
from forecast_harness.authors.triton.analysis.source_unit import (
    assigned_names,
    fresh_name,
    names,
    nodes_in_order,
    parse_expression,
    read_names,
    swap_expressions,
)


def inference_mode(code: ParsedSource, facts: InputFacts) -> Iterator[TorchEdit]:
    """Nothing is noted down for gradients: the entry runs in inference mode, or without gradients."""
    entry = code.entry_function
    if entry is None or code.uses_autograd:
        return
    decorated = {ast.unparse(d) for d in entry.decorator_list}
    for mode in ("torch.inference_mode()", "torch.no_grad()"):
        if mode in decorated or "torch.inference_mode()" in decorated:
            continue
        draft = code.copy()
        twin = draft.twin(entry)
        kept = [d for d in twin.decorator_list if ast.unparse(d) != "torch.no_grad()"]
        twin.decorator_list = [parse_expression(mode), *kept]
        yield TorchEdit(draft.text(), f"runs under {mode}")
    for node in ast.walk(code.tree):
        if isinstance(node, ast.withitem) and ast.unparse(node.context_expr) == "torch.no_grad()":
            draft = code.copy()
            draft.twin(node).context_expr = parse_expression("torch.inference_mode()")
            yield TorchEdit(draft.text(), "inference mode in place of no gradients")


def eliminate_common_subexpressions(code: ParsedSource, facts: InputFacts) -> Iterator[TorchEdit]:
    """What is written twice in a row of statements is worked out once."""
    for function in code.functions:
        scope = FunctionScope(code, function)
        for block in _statement_blocks(function):
            for places in _repeated_expressions(block, code, scope):
                draft = code.copy()
                name = fresh_name("shared", names(draft.tree))
                first = next(s for s in block if any(n is places[0] for n in ast.walk(s)))
                twin = draft.twin(first)
                made = ast.Assign([ast.Name(name, ast.Store())], copy.deepcopy(draft.twin(places[0])))
                swaps: dict[int, ast.expr] = {id(draft.twin(p)): ast.Name(name, ast.Load()) for p in places}
                swap_expressions(draft.tree, swaps)
                for inner in _statement_blocks(draft.twin(function)):
                    if any(s is twin for s in inner):
                        inner.insert(next(i for i, s in enumerate(inner) if s is twin), made)
                yield TorchEdit(draft.text(), "worked out once where it was written twice")


def _statement_blocks(function: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    for node in nodes_in_order(function):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def _repeated_expressions(
    block: list[ast.stmt], code: ParsedSource, scope: FunctionScope
) -> Iterator[list[ast.expr]]:
    """Equal expressions of a block whose names do not change in it."""
    plain = [s for s in block if isinstance(s, ast.Assign | ast.AugAssign | ast.Expr | ast.Return)]
    counted: dict[str, list[ast.expr]] = {}
    for statement in plain:
        for node in nodes_in_order(statement):
            if isinstance(node, ast.Call) or is_arithmetic(node):
                assert isinstance(node, ast.expr)
                counted.setdefault(ast.dump(node), []).append(node)
    changed = set(assigned_names(block)) | scope.mutated
    for places in counted.values():
        used = read_names(places[0]) - set(code.modules)
        steady = used and not used & changed and is_pure(places[0])
        if len(places) > 1 and steady and not scope.scalar(places[0]):
            yield places
