"""Functions that the compiler spells out at length, in fewer instructions and without branches."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

from forecast_harness.authors.triton.analysis.function_facts import FunctionFacts, broadcast_shape
from forecast_harness.authors.triton.analysis.source_unit import (
    SourceUnit,
    fresh_name,
    names,
    nodes_in_order,
    parse_statements,
    swap_expressions,
)
from forecast_harness.authors.triton.protocol import RewriteContext, SourceEdit

LOG2_E = 1.4426950408889634


def exp2(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """`exp(x - m)` as `exp2(x * c - m * c)`: one fused multiply-add and one `ex2` for each element.

    Any other `exp(x)` of float32 is `exp2(x * c)`: what Triton makes of `exp` scales its argument and its
    result once more, for results too small for a normal float32.
    """
    draft, changed = unit.copy(), 0
    for function in unit.kernels:
        facts, swaps = context.facts(unit, function), {}
        for call in unit.calls(function, "exp"):
            inner = call.args[0] if len(call.args) == 1 and not call.keywords else None
            if inner is None or not facts.is_float32(inner):
                continue
            if (
                isinstance(inner, ast.BinOp)
                and isinstance(inner.op, ast.Sub)
                and _subtracts_shared(facts, inner)
            ):
                power = ast.BinOp(_scaled(inner.left), ast.Sub(), _scaled(inner.right))
            else:
                power = _scaled(inner)
            swaps[id(draft.twin(call))] = unit.language_call("exp2", power)
        swap_expressions(draft.twin(function), swaps)
        changed += len(swaps)
    if changed:
        yield SourceEdit(draft, "exp as exp2, with a fused multiply-add where something is subtracted", 2.0)


def _scaled(value: ast.expr) -> ast.BinOp:
    return ast.BinOp(copy.deepcopy(value), ast.Mult(), ast.Constant(LOG2_E))


def _subtracts_shared(facts: FunctionFacts, difference: ast.BinOp) -> bool:
    """Whether float32 is subtracted that is the same for many elements, so that its product is cheap."""
    left, right = facts.shape(difference.left), facts.shape(difference.right)
    if left is None or right is None or broadcast_shape([left, right]) != left:
        return False
    both = facts.is_float32(difference.left) and facts.is_float32(difference.right)
    return both and _count_dimensions(right) < _count_dimensions(left)


def _count_dimensions(shape: tuple[str, ...]) -> int:
    return len([side for side in shape if side != "1"])


_SIGMOID = """
def {name}(x):
    root = {tl}.rsqrt(1.0 + {tl}.exp2(x * -{log2_e}))
    return root * root
"""


def sigmoid(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """`sigmoid` of float32 by a reciprocal square root: a division guards against what never happens here."""
    draft = _replaced_sigmoids(unit, context)
    if draft is not None:
        yield SourceEdit(draft, "sigmoid by a reciprocal square root instead of a division", 8.0)


@dataclass(frozen=True)
class _FunctionMatch:
    """A call of a function, or what amounts to one."""

    argument: ast.expr
    times: ast.expr | None = None
    """Factor of the result."""


def _match_sigmoid(facts: FunctionFacts, node: ast.AST) -> _FunctionMatch | None:
    """`tl.sigmoid(x)`, `1 / (1 + tl.exp(-x))` and `y / (1 + tl.exp(-x))`."""
    if call := _single_call(facts, node, "sigmoid"):
        return call
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
        return None
    below = node.right
    if not isinstance(below, ast.BinOp) or not isinstance(below.op, ast.Add):
        return None
    power = below.right if _is_one(below.left) else below.left if _is_one(below.right) else None
    inner = None if power is None else _single_call(facts, power, "exp")
    if inner is None or not isinstance(inner.argument, ast.UnaryOp):
        return None
    if not isinstance(inner.argument.op, ast.USub):
        return None
    if _is_one(node.left):
        return _FunctionMatch(inner.argument.operand)
    return _FunctionMatch(inner.argument.operand, node.left) if facts.is_float32(node.left) else None


def _single_call(facts: FunctionFacts, node: ast.AST, name: str) -> _FunctionMatch | None:
    if not isinstance(node, ast.Call) or facts.unit.callee_name(node) != name:
        return None
    alone = len(node.args) == 1 and not node.keywords
    return _FunctionMatch(node.args[0]) if alone and facts.is_float32(node.args[0]) else None


def _is_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 1


def _replaced_sigmoids(unit: SourceUnit, context: RewriteContext) -> SourceUnit | None:
    """A copy that calls a function of its own in place of sigmoids; None where there are none."""
    jit = unit.entry.decorator_list[-1] if unit.entry.decorator_list else None
    jit = jit.func if isinstance(jit, ast.Call) else jit
    if jit is None or not unit.tl:
        return None
    name = fresh_name("sigmoid_by_root", names(unit.tree) | set(unit.functions))
    places = []
    for function in unit.kernels:
        facts = context.facts(unit, function)
        places += [
            (node, match) for node in nodes_in_order(function) if (match := _match_sigmoid(facts, node))
        ]
    if not places:
        return None
    draft = unit.copy()
    # The innermost first: an argument may hold another place.
    for node, match in reversed(places):
        call: ast.expr = ast.Call(ast.Name(name, ast.Load()), [draft.twin(match.argument)], [])
        if match.times is not None:
            call = ast.BinOp(draft.twin(match.times), ast.Mult(), call)
        swap_expressions(draft.tree, {id(draft.twin(node)): call})
    (helper,) = parse_statements(_SIGMOID.format(name=name, tl=unit.tl, log2_e=LOG2_E))
    assert isinstance(helper, ast.FunctionDef)
    helper.decorator_list = [copy.deepcopy(jit)]
    at = next(i for i, s in enumerate(draft.tree.body) if isinstance(s, ast.FunctionDef))
    draft.tree.body.insert(at, helper)
    return draft
