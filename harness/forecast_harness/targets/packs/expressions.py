"""Arithmetic over axis names, as packs write it ("2 * M * N"): read without `eval`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from forecast_autotune import python_parser
from forecast_autotune.errors import RecordError

_BINARY_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluate(text: str | int, axes: Mapping[str, int]) -> int:
    """The integer that `text` gives with these axis values.

    Knows integers, axis names, `+ - * // %`, `min`, `max` and brackets. Raises `RecordError` for all else.
    """
    if isinstance(text, int):
        return text
    try:
        return _evaluate_node(python_parser.parse_expression(text), axes)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError) as error:
        known = ", ".join(sorted(axes)) or "none"
        raise RecordError(f"cannot evaluate {text!r:.80} ({error}); axes here: {known}") from error


def _evaluate_node(node: ast.expr, axes: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in axes:
            raise ValueError(f"{node.id} is no axis")
        return axes[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY_OPERATORS:
        return int(
            _BINARY_OPERATORS[type(node.op)](
                _evaluate_node(node.left, axes), _evaluate_node(node.right, axes)
            )
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords and node.args:
        arguments = [_evaluate_node(a, axes) for a in node.args]
        if node.func.id == "min":
            return min(arguments)
        if node.func.id == "max":
            return max(arguments)
    raise ValueError("only integers, axis names, + - * // %, min and max")
