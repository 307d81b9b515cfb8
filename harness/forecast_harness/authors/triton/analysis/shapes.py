"""Shapes of blocks as texts, and the arguments of calls that say them."""

from __future__ import annotations

import ast
from collections.abc import Sequence

BlockShape = tuple[str, ...]
"""One text per dimension, `1` for a broadcast one; the empty tuple is a scalar."""

UNKNOWN_SHAPE: BlockShape = ("?",)
"""Of names that nothing has been seen of yet."""


def common_shape(shapes: Sequence[BlockShape | None]) -> BlockShape | None:
    """The shape if all are the same; else None."""
    first = shapes[0]
    return first if all(s == first for s in shapes) else None


def broadcast_shape(shapes: Sequence[BlockShape]) -> BlockShape | None:
    """The shape that shapes broadcast to; None where they do not fit. Missing dimensions are in front."""
    rank = max(map(len, shapes))
    padded = [("1",) * (rank - len(s)) + s for s in shapes]
    sides = []
    for column in zip(*padded, strict=True):
        given = {c for c in column if c != "1"}
        if len(given) > 1:
            return None
        sides.append(min(given, default="1"))
    return tuple(sides)


def indexed_shape(shape: BlockShape | None, index: ast.expr) -> BlockShape | None:
    """The shape of `x[index]` for indices that add dimensions; None for others."""
    if shape is None or shape == UNKNOWN_SHAPE:
        return shape
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    left, found = list(shape), []
    for part in parts:
        if isinstance(part, ast.Constant) and part.value is None:
            found.append("1")
        elif isinstance(part, ast.Slice) and part.lower is part.upper is part.step is None and left:
            found.append(left.pop(0))
        else:
            return None
    return tuple(found + left)


def arange_side(given: Sequence[ast.expr]) -> str:
    """The side of `arange(first, last)`."""
    first, last = given
    if isinstance(first, ast.Constant) and first.value == 0:
        return ast.unparse(last)
    return f"{ast.unparse(last)} - {ast.unparse(first)}"


def keyword(node: ast.Call, name: str) -> ast.expr | None:
    """A keyword's value; None if it is not given."""
    return next((k.value for k in node.keywords if k.arg == name), None)


def argument(node: ast.Call, position: int, name: str) -> ast.expr | None:
    """An argument of a call, by position or name; None if it is not given."""
    return node.args[position] if len(node.args) > position else keyword(node, name)


def reduced_axis(node: ast.Call, given: Sequence[ast.expr]) -> int | str | None:
    """The axis of a reduction; None for all of them, a text where it is no plain number."""
    axis = given[1] if len(given) > 1 else keyword(node, "axis")
    if axis is None or (isinstance(axis, ast.Constant) and axis.value is None):
        return None
    if isinstance(axis, ast.Constant) and isinstance(axis.value, int):
        return axis.value
    if (
        isinstance(axis, ast.UnaryOp)
        and isinstance(axis.op, ast.USub)
        and isinstance(axis.operand, ast.Constant)
    ):
        return -int(axis.operand.value)  # type: ignore[arg-type]
    return ast.unparse(axis)


def axis_of(call: ast.AST) -> int:
    """The axis of a `program_id` or `num_programs` call; -1 if it is no plain number."""
    assert isinstance(call, ast.Call)
    given = argument(call, 0, "axis")
    return given.value if isinstance(given, ast.Constant) and isinstance(given.value, int) else -1
