"""Put helpers that are one expression where they are called, so that rewrites see through them."""

from __future__ import annotations

import ast
import copy

from forecast_harness.authors.triton.analysis.source_unit import (
    Function,
    SourceUnit,
    arguments,
    assigned_names,
    names,
    read_names,
    swap_expressions,
)
from forecast_harness.authors.triton.program_order import docstring_length

_ROUNDS = 4
"""How deep helpers may call helpers."""


def inline_helpers(unit: SourceUnit) -> SourceUnit:
    """A copy with calls of one-expression helpers replaced by the expression. Helpers stay defined."""
    draft = unit.copy()
    for _ in range(_ROUNDS):
        changed = 0
        for function in draft.kernels:
            found = {}
            for call in draft.helper_calls(function):
                value = _inlined_value(draft, function, call)
                if value is not None:
                    found[id(call)] = value
            swap_expressions(function, found)
            changed += len(found)
        if not changed:
            break
    return SourceUnit.parse(draft.text(), draft.entry_name)


def _inlined_value(unit: SourceUnit, caller: Function, call: ast.Call) -> ast.expr | None:
    assert isinstance(call.func, ast.Name)
    helper = unit.functions[call.func.id]
    body = helper.body[docstring_length(helper.body) :]
    given = _bind_arguments(helper, call)
    if len(body) != 1 or not isinstance(body[0], ast.Return) or body[0].value is None or given is None:
        return None
    if helper is caller or helper.decorator_list != [d for d in helper.decorator_list if _is_plain_jit(d)]:
        return None
    value = copy.deepcopy(body[0].value)
    free = read_names(value) - set(given)
    inner = unit.effects(value) or any(isinstance(n, ast.Lambda | ast.NamedExpr) for n in ast.walk(value))
    if inner or free & (names(caller) - unit.constexprs(caller) | set(assigned_names(caller))) - {unit.tl}:
        return None
    count = {p: sum(isinstance(n, ast.Name) and n.id == p for n in ast.walk(value)) for p in given}
    if any(unit.effects(a) and count[p] != 1 for p, a in given.items()):
        return None  # what is loaded once would be loaded twice, or never
    parts = [n for n in ast.walk(value) if isinstance(n, ast.Name) and n.id in given]
    if isinstance(value, ast.Name):
        return copy.deepcopy(given[value.id]) if value.id in given else None
    return swap_expressions(value, {id(n): copy.deepcopy(given[n.id]) for n in parts})


def _is_plain_jit(decorator: ast.expr) -> bool:
    """`@triton.jit` without options: `noinline` is somebody's wish."""
    return not isinstance(decorator, ast.Call)


def _bind_arguments(helper: Function, call: ast.Call) -> dict[str, ast.expr] | None:
    """Arguments by parameter; None where the call leaves some to defaults or spreads them."""
    parameters = [a.arg for a in arguments(helper)]
    if any(isinstance(a, ast.Starred) for a in call.args) or helper.args.vararg or helper.args.kwarg:
        return None
    given = dict(zip(parameters, call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in given:
            return None
        given[keyword.arg] = keyword.value
    return given if set(given) == set(parameters) else None
