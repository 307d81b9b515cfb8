"""Cheaper arithmetic: sums kept per lane, products for quotients, `exp2`, dots that accumulate."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from forecast_harness.authors.triton.analysis.function_facts import FunctionFacts
from forecast_harness.authors.triton.analysis.loops import RangeLoop, loops
from forecast_harness.authors.triton.analysis.shapes import argument, broadcast_shape, reduced_axis
from forecast_harness.authors.triton.analysis.source_unit import (
    SourceUnit,
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

LOG2_E = 1.4426950408889634


def accumulate(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """`acc += tl.dot(a, b)` as `acc = tl.dot(a, b, acc)`.

    Triton does this itself, except for fp8, where it adds up in float32 outside of the tensor cores.
    """
    draft, changed = unit.copy(), 0
    for function in unit.kernels:
        facts = context.facts(unit, function)
        for node in nodes_in_order(function):
            sums = isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)
            if not sums or not isinstance(node, ast.AugAssign) or unit.callee_name(node.value) != "dot":
                continue
            call, target = node.value, node.target
            assert isinstance(call, ast.Call)
            if not isinstance(target, ast.Name) or not _starts_at_zero(facts, target.id):
                continue
            if len(call.args) != 2 or {k.arg for k in call.keywords} & {"acc", "out_dtype", None}:
                continue
            new = copy.deepcopy(call)
            new.args.append(ast.Name(target.id, ast.Load()))
            assign = ast.Assign([ast.Name(target.id, ast.Store())], new)
            copied = draft.twin(node)
            _replace_with(draft.tree, copied, assign)
            changed += 1
    if changed:
        yield SourceEdit(draft, "the tensor cores add to the accumulator themselves", 1.0)


def _starts_at_zero(facts: FunctionFacts, name: str) -> bool:
    """Whether a name begins as float32 zeros."""
    for value in facts.definitions.get(name, []):
        if isinstance(value, ast.Call) and facts.unit.callee_name(value) == "zeros":
            given = argument(value, 1, "dtype")
            return given is not None and facts.is_float32_type(given)
    return False


def _replace_with(tree: ast.Module, old: ast.stmt, new: ast.stmt) -> None:
    for node in ast.walk(tree):
        for name in ("body", "orelse"):
            block = getattr(node, name, None)
            if isinstance(block, list) and any(s is old for s in block):
                block[:] = [new if s is old else s for s in block]


def reciprocal(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """A block divided by something smaller is multiplied by its reciprocal instead."""
    draft, changed = unit.copy(), 0
    for function in unit.kernels:
        facts, found = context.facts(unit, function), {}
        for node in nodes_in_order(function):
            if (
                isinstance(node, ast.BinOp)
                and isinstance(node.op, ast.Div)
                and _divisor_is_shared(facts, node)
            ):
                copied = draft.twin(node)
                inverse = ast.BinOp(ast.Constant(1.0), ast.Div(), copied.right)
                found[id(copied)] = ast.BinOp(copied.left, ast.Mult(), _inverted(inverse))
        swap_expressions(draft.twin(function), found)
        changed += len(found)
    if changed:
        yield SourceEdit(draft, "blocks are multiplied by a reciprocal instead of being divided", 2.5)


def _inverted(quotient: ast.BinOp) -> ast.expr:
    """1 / x[:, None] as (1 / x)[:, None]: the division of the smaller one."""
    if isinstance(quotient.right, ast.Subscript):
        whole = quotient.right
        quotient.right = whole.value
        return ast.Subscript(quotient, whole.slice, ast.Load())
    return quotient


def _divisor_is_shared(facts: FunctionFacts, node: ast.BinOp) -> bool:
    """Whether a float32 block is divided by what is the same for many of its elements."""
    if not facts.is_float32(node.left) or not (
        facts.is_float32(node.right) or _is_numeric_scalar(facts, node.right)
    ):
        return False
    left, right = facts.shape(node.left), facts.shape(node.right)
    if left is None or right is None or isinstance(node.right, ast.Constant):
        return False
    used = [side for side in right if side != "1"]
    return len([side for side in left if side != "1"]) > len(used)


def _is_numeric_scalar(facts: FunctionFacts, node: ast.expr) -> bool:
    """A scalar parameter that is only a number: Triton divides integers as float32, too."""
    return isinstance(node, ast.Name) and node.id in facts.parameters and node.id not in facts.definitions


def exp2(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """`exp(x - m)` as `exp2(x * c - m * c)`: one fused multiply-add and one `ex2` for each element.

    Any other `exp(x)` of float32 is `exp2(x * c)`: what Triton makes of `exp` scales its argument and its
    result once more, for results too small for a normal float32.
    """
    draft, changed = unit.copy(), 0
    for function in unit.kernels:
        facts, found = context.facts(unit, function), {}
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
            found[id(draft.twin(call))] = unit.language_call("exp2", power)
        swap_expressions(draft.twin(function), found)
        changed += len(found)
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


def lane_sums(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """Keep a running sum or maximum per lane; reduce across lanes once, after the loop.

    A reduction in every iteration costs a barrier and a trip through shared memory.
    """
    draft, changed = unit.copy(), 0
    for function in unit.kernels:
        facts, taken = context.facts(unit, function), names(function)
        for loop in loops(unit, function):
            if loop.may_exit_early:
                continue
            for statement in loop.node.body:
                plan = _lane_reduction(facts, loop, statement)
                if plan is None:
                    continue
                total, kind, call, shape = plan
                lanes = fresh_name(f"{total}_lanes", taken)
                _keep_per_lane(draft, loop, statement, (total, kind, lanes), call, shape)
                changed += 1
    if changed:
        yield SourceEdit(draft, "sums are kept per lane and reduced once, after the loop", 6.0)


def _lane_reduction(
    facts: FunctionFacts, loop: RangeLoop, statement: ast.stmt
) -> tuple[str, str, ast.Call, tuple[str, ...]] | None:
    """Running total, `sum`, `max` or `min`, the reduction, and the shape of what it reduces."""
    found = _running_total(facts.unit, statement)
    if found is None:
        return None
    total, kind, call = found
    value = call.args[0]
    body = [s for s in loop.node.body if s is not statement]
    if (
        total in read_names(body) | set(assigned_names(body))
        or total in read_names(value)
        or not facts.is_float32(value)
    ):
        return None
    shape, axis = facts.shape(value), reduced_axis(call, call.args)
    outer = facts.shape(ast.Name(total, ast.Load()))
    if shape is None or outer is None or "1" in shape or isinstance(axis, str):
        return None
    if any(k.arg not in ("axis",) for k in call.keywords) or not facts.is_float32(
        ast.Name(total, ast.Load())
    ):
        return None
    left = list(shape)
    if axis is None:
        left = []
    else:
        del left[axis]
    # The sides must mean before the loop what they mean inside.
    sides = {n.id for side in shape for n in ast.walk(parse_expression(side)) if isinstance(n, ast.Name)}
    return (total, kind, call, shape) if tuple(left) == outer and sides <= facts.constant else None


def _running_total(unit: SourceUnit, statement: ast.stmt) -> tuple[str, str, ast.Call] | None:
    """`t += tl.sum(x)`, `t = t + tl.sum(x)` and `t = tl.maximum(t, tl.max(x))`."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
        sides: list[ast.expr] = [ast.Name(getattr(statement.target, "id", ""), ast.Load()), statement.value]
        target: ast.expr = statement.target
        kind = "sum"
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, value = statement.targets[0], statement.value
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            sides, kind = [value.left, value.right], "sum"
        elif (
            unit.callee_name(value) in ("maximum", "minimum")
            and isinstance(value, ast.Call)
            and len(value.args) == 2
        ):
            sides, kind = list(value.args), unit.callee_name(value)[:3]
        else:
            return None
    else:
        return None
    for own, other in (sides, sides[::-1]):
        same = isinstance(own, ast.Name) and isinstance(target, ast.Name) and own.id == target.id
        if same and isinstance(other, ast.Call) and unit.callee_name(other) == kind and other.args:
            return target.id if isinstance(target, ast.Name) else "", kind, other
    return None


def _keep_per_lane(
    draft: SourceUnit,
    loop: RangeLoop,
    statement: ast.stmt,
    naming: tuple[str, str, str],
    call: ast.Call,
    shape: tuple[str, ...],
) -> None:
    total, kind, lanes = naming
    tl, block, node = draft.tl, draft.twin(loop.block), draft.twin(loop.node)
    sides, value = ", ".join(shape), ast.unparse(call.args[0])
    empty = {"sum": "0.0", "max": 'float("-inf")', "min": 'float("inf")'}[kind]
    reduced = copy.deepcopy(call)
    reduced.args[0] = ast.Name(lanes, ast.Load())
    if kind == "sum":
        step, last = f"{lanes} += {value}", f"{total} += {ast.unparse(reduced)}"
    else:
        step = f"{lanes} = {tl}.{kind}imum({lanes}, {value})"
        last = f"{total} = {tl}.{kind}imum({total}, {ast.unparse(reduced)})"
    _replace_with(draft.tree, draft.twin(statement), parse_statements(step)[0])
    at = next(i for i, s in enumerate(block) if s is node)
    block[at + 1 : at + 1] = parse_statements(last)
    block[at:at] = parse_statements(f"{lanes} = {tl}.full([{sides}], {empty}, {tl}.float32)")
