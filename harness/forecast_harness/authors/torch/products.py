"""Sums of products by other names: einsum as a product of matrices, layouts made before it."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator

from forecast_harness.authors.torch.protocol import InputFacts, TorchEdit
from forecast_harness.authors.torch.source_code import ParsedSource, read_expressions
from forecast_harness.authors.triton.analysis.source_unit import parse_expression, swap_expressions

_EINSUM_EQUATION = re.compile(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]*)")


def einsum_to_matmul(code: ParsedSource, facts: InputFacts) -> Iterator[TorchEdit]:
    """An einsum of two operands as `matmul` of permuted ones: batch axes, one free axis each, one summed."""
    found: list[tuple[ast.expr, ast.expr]] = []
    for function in code.functions:
        for node in read_expressions(function):
            if (made := _as_matmul(node)) is not None:
                found.append((node, made))
    for places in [[one] for one in found] + ([found] if len(found) > 1 else []):
        draft = code.copy()
        swap_expressions(draft.tree, {id(draft.twin(old)): copy.deepcopy(new) for old, new in places})
        yield TorchEdit(draft.text(), "a product of matrices, where an einsum would find out how first")


def contiguous_operands(code: ParsedSource, facts: InputFacts) -> Iterator[TorchEdit]:
    """What `permute` gives is laid out as it is read, at each place and at all."""
    places = [
        node
        for function in code.functions
        for node in read_expressions(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "permute"
    ]
    for some in [[one] for one in places] + ([places] if len(places) > 1 else []):
        draft = code.copy()
        made: dict[int, ast.expr] = {
            id(draft.twin(p)): ast.Call(ast.Attribute(copy.deepcopy(p), "contiguous", ast.Load()), [], [])
            for p in some
        }
        swap_expressions(draft.tree, made)
        yield TorchEdit(draft.text(), "permuted tensors are laid out as they are read")


def _as_matmul(node: ast.expr) -> ast.expr | None:
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.einsum" and len(node.args) == 3):
        return None
    stated, a, b = node.args
    if not (isinstance(stated, ast.Constant) and isinstance(stated.value, str)) or node.keywords:
        return None
    parts = _EINSUM_EQUATION.fullmatch(stated.value.replace(" ", ""))
    if parts is None or any(len(set(p)) < len(p) for p in parts.groups()):
        return None
    left, right, out = parts.groups()
    batch = [c for c in out if c in left and c in right]
    summed = [c for c in left if c in right and c not in out]
    free_a = [c for c in left if c not in right]
    free_b = [c for c in right if c not in left]
    if len(summed) != 1 or len(free_a) != 1 or len(free_b) != 1 or set(out) != {*batch, *free_a, *free_b}:
        return None
    first = _permuted(a, left, [*batch, *free_a, *summed])
    second = _permuted(b, right, [*batch, *summed, *free_b])
    product = ast.BinOp(first, ast.MatMult(), second)
    return _permuted(product, "".join([*batch, *free_a, *free_b]), list(out))


def _permuted(value: ast.expr, have: str, want: list[str]) -> ast.expr:
    order = [have.index(c) for c in want]
    if order == list(range(len(order))):
        return copy.deepcopy(value)
    made = parse_expression(f"_v.permute({', '.join(map(str, order))})")
    (name,) = (n for n in ast.walk(made) if isinstance(n, ast.Name))
    return swap_expressions(ast.Expression(made), {id(name): copy.deepcopy(value)}).body
