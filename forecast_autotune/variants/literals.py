"""The value of an expression that only calculates, read without `eval`: what `CONFIGS` may be written as."""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_MAX_NUMBER = 1 << 62
_MAX_LENGTH = 4096
"""Elements of a list, passes of a comprehension."""

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.LShift: lambda a, b: a << _check_exponent(b),
    ast.RShift: lambda a, b: a >> _check_exponent(b),
    ast.Pow: lambda a, b: a ** _check_exponent(b),
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_CALLS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "len": len, "int": int}


def evaluate_literal(node: ast.expr, names: Mapping[str, Any] | None = None) -> Any:
    """The value, with these names known.

    Numbers, texts, lists, tuples, dicts, arithmetic, comparisons, conditions, comprehensions, and calls of
    range, min, max, len, int. Raises `ValueError` for all else, and for what grows too large.
    """
    try:
        return _value(node, dict(names or {}))
    except (TypeError, KeyError, IndexError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{ast.unparse(node)[:60]}: {error}") from error


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise ValueError(f"{node.id} is not known here")
        return names[node.id]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        items = [_value(n, names) for n in node.elts]
        return tuple(items) if isinstance(node, ast.Tuple) else items
    if isinstance(node, ast.Dict):
        return {_value(k, names): _value(v, names) for k, v in zip(node.keys, node.values, strict=True) if k}
    if isinstance(node, ast.ListComp | ast.GeneratorExp):
        return [_value(node.elt, inner) for inner in _comprehension_scopes(node.generators, names)]
    if isinstance(node, ast.Call):
        return _called(node, names)
    return _calculated(node, names)


def _calculated(node: ast.expr, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.UnaryOp):
        value = _value(node.operand, names)
        return (
            not value if isinstance(node.op, ast.Not) else -value if isinstance(node.op, ast.USub) else value
        )
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        value = _BINARY[type(node.op)](_value(node.left, names), _value(node.right, names))
        if (isinstance(value, int) and abs(value) > _MAX_NUMBER) or (
            isinstance(value, str | list | tuple) and len(value) > _MAX_LENGTH
        ):
            raise ValueError("the value grows too large")
        return value
    if isinstance(node, ast.BoolOp):
        values = [_value(n, names) for n in node.values]
        return all(values) if isinstance(node.op, ast.And) else any(values)
    if isinstance(node, ast.Compare):
        sides = [_value(n, names) for n in (node.left, *node.comparators)]
        pairs = zip(node.ops, itertools.pairwise(sides), strict=True)
        return all(_COMPARE[type(op)](a, b) for op, (a, b) in pairs)
    if isinstance(node, ast.IfExp):
        return _value(node.body if _value(node.test, names) else node.orelse, names)
    if isinstance(node, ast.Subscript):
        return _value(node.value, names)[_value(node.slice, names)]
    raise ValueError(f"{type(node).__name__} is more than calculation")


def _called(node: ast.Call, names: dict[str, Any]) -> Any:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    given = [_value(a, names) for a in node.args]
    if name == "range" and not node.keywords:
        return list(itertools.islice(range(*given), _MAX_LENGTH))
    if name not in _CALLS or node.keywords:
        raise ValueError(f"it calls {ast.unparse(node.func)}")
    return _CALLS[name](*given)


def _comprehension_scopes(
    generators: list[ast.comprehension], names: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The names of every pass of nested loops that its conditions let through."""
    count = 0

    def nested(depth: int, known: dict[str, Any]) -> Iterator[dict[str, Any]]:
        nonlocal count
        if depth == len(generators):
            yield known
            return
        loop = generators[depth]
        for item in _value(loop.iter, known):
            count += 1
            if count > _MAX_LENGTH:
                raise ValueError(f"more than {_MAX_LENGTH} passes")
            inner = {**known, **_bind_target(loop.target, item)}
            if all(_value(test, inner) for test in loop.ifs):
                yield from nested(depth + 1, inner)

    return nested(0, names)


def _bind_target(target: ast.expr, item: Any) -> dict[str, Any]:
    if isinstance(target, ast.Name):
        return {target.id: item}
    if isinstance(target, ast.Tuple | ast.List):
        pairs = zip(target.elts, item, strict=True)
        return {name: value for part, one in pairs for name, value in _bind_target(part, one).items()}
    raise ValueError(f"{ast.unparse(target)} is no plain name")


def _check_exponent(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > 62:
        raise ValueError("the value grows too large")
    return value
