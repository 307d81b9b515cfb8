"""Every rewrite, and what they make of a source, alone and in pairs."""

from __future__ import annotations

import ast
import copy
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from forecast_autotune import python_parser
from forecast_autotune.errors import RecordError
from forecast_autotune.python_parser import parse_expression
from forecast_harness.authors.torch import rules
from forecast_harness.authors.torch.source_code import ParsedSource, TextEdit, read_expressions
from forecast_harness.authors.triton.analysis.source_unit import (
    MAX_EDITS,
    swap_expressions,
)

MAX_PAIRS = 400
"""Most combinations of two rewrites that are made of one source."""


@dataclass(frozen=True)
class RewrittenSource:
    """An edited source and the rewrites that made it."""

    names: tuple[str, ...]
    text: str = field(repr=False)
    note: str


def _apply_rules(selection: Iterable[rules.RewriteRule], code: ParsedSource) -> Iterator[TextEdit]:
    for rule in selection:
        yield from rules.apply_rule(code, rule)


def inference_mode(code: ParsedSource) -> Iterator[TextEdit]:
    """Nothing is noted down for gradients: the entry runs in inference mode, or without gradients."""
    entry = code.entry_function
    if entry is None or code.uses_autograd:
        return
    decorators = {ast.unparse(d) for d in entry.decorator_list}
    for mode in ("torch.inference_mode()", "torch.no_grad()"):
        if mode in decorators or "torch.inference_mode()" in decorators:
            continue
        draft = code.copy()
        twin = draft.twin(entry)
        rest = [d for d in twin.decorator_list if ast.unparse(d) != "torch.no_grad()"]
        twin.decorator_list = [parse_expression(mode), *rest]
        yield draft.text(), f"runs under {mode}"
    for node in ast.walk(code.tree):
        if isinstance(node, ast.withitem) and ast.unparse(node.context_expr) == "torch.no_grad()":
            draft = code.copy()
            draft.twin(node).context_expr = parse_expression("torch.inference_mode()")
            yield draft.text(), "inference mode in place of no gradients"


# --- products of matrices ---


_EINSUM_EQUATION = re.compile(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]*)")


def einsum_to_matmul(code: ParsedSource) -> Iterator[TextEdit]:
    """An einsum of two operands as `matmul` of permuted ones: batch axes, one free axis each, one summed."""
    products = [
        (node, product)
        for function in code.functions
        for node in read_expressions(function)
        if (product := _as_matmul(node)) is not None
    ]
    return code.replaced(products, "a product of matrices, where an einsum would find out how first")


def contiguous_operands(code: ParsedSource) -> Iterator[TextEdit]:
    """Results of `permute` are laid out as they are read, at each place and at all."""
    places = [
        (node, ast.Call(ast.Attribute(node, "contiguous", ast.Load()), [], []))
        for function in code.functions
        for node in read_expressions(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "permute"
    ]
    return code.replaced(places, "permuted tensors are laid out as they are read")


def _as_matmul(node: ast.expr) -> ast.expr | None:
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.einsum" and len(node.args) == 3):
        return None
    equation, a, b = node.args
    if not (isinstance(equation, ast.Constant) and isinstance(equation.value, str)) or node.keywords:
        return None
    parts = _EINSUM_EQUATION.fullmatch(equation.value.replace(" ", ""))
    if parts is None or any(len(set(p)) < len(p) for p in parts.groups()):
        return None
    left, right, out = parts.groups()
    batch = [c for c in out if c in left and c in right]
    inner = [c for c in left if c in right and c not in out]
    free_a = [c for c in left if c not in right]
    free_b = [c for c in right if c not in left]
    if len(inner) != 1 or len(free_a) != 1 or len(free_b) != 1 or set(out) != {*batch, *free_a, *free_b}:
        return None
    first = _permute(a, left, [*batch, *free_a, *inner])
    second = _permute(b, right, [*batch, *inner, *free_b])
    product = ast.BinOp(first, ast.MatMult(), second)
    return _permute(product, "".join([*batch, *free_a, *free_b]), list(out))


def _permute(value: ast.expr, have: str, want: list[str]) -> ast.expr:
    order = [have.index(c) for c in want]
    if order == list(range(len(order))):
        return copy.deepcopy(value)
    expression = parse_expression(f"_v.permute({', '.join(map(str, order))})")
    (name,) = (n for n in ast.walk(expression) if isinstance(n, ast.Name))
    return swap_expressions(ast.Expression(expression), {id(name): copy.deepcopy(value)}).body


# --- constants in upper case ---


MIN_VALUE, MAX_VALUE = 1, 1 << 20


def constants_of(code: ParsedSource) -> Mapping[str, ast.Assign]:
    """Assignments of plain integers to names in upper case, by name; those assigned once."""
    constants: dict[str, ast.Assign] = {}
    repeats = set()
    for node in code.tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, node.value
            if name.isupper() and isinstance(value, ast.Constant) and type(value.value) is int:
                repeats |= {name} & set(constants)
                constants[name] = node
    return {name: node for name, node in constants.items() if name not in repeats}


def vary_constants(code: ParsedSource) -> Iterator[TextEdit]:
    """Every constant doubled, halved, and four times as large or small."""
    for name, node in constants_of(code).items():
        value = int(ast.literal_eval(node.value))
        for new in (value * 2, value // 2, value * 4, value // 4):
            if value > 0 and MIN_VALUE <= new <= MAX_VALUE and new != value:
                draft = code.copy()
                draft.twin(node).value = ast.Constant(new)
                yield draft.text(), f"{name} = {new} in place of {value}"


Rewrite = Callable[[ParsedSource], Iterable[TextEdit]]
"""Yields nothing where it does not apply. Never changes its argument."""
REWRITES: Mapping[str, Rewrite] = {
    # In the order in which they are applied to one another: what shows patterns first, what hides them last.
    **{
        name: partial(_apply_rules, tuple(r for r in rules.RULES if r.name == name))
        for name in dict.fromkeys(r.name for r in rules.RULES)
    },
    "einsum-to-matmul": einsum_to_matmul,
    "contiguous-operands": contiguous_operands,
    "inference-mode": inference_mode,
    "constants": vary_constants,
}
"""By name."""


def rewrites_of(source: str, entry: str) -> list[RewrittenSource]:
    """All rewrites of a source, each different text once: single ones, then pairs.

    Always in the same order. Raises `RecordError` for a source that is not Python.
    """
    code = ParsedSource.parse(source, entry)
    forms, names = {_canonical_form(source)}, list(REWRITES)
    singles = [rewrite for name in names for rewrite in _apply_rewrite(name, code, forms)]
    return [*singles, *itertools.islice(_pairs(singles, names, entry, forms), MAX_PAIRS)]


def _pairs(
    singles: Sequence[RewrittenSource], names: Sequence[str], entry: str, forms: set[str]
) -> Iterator[RewrittenSource]:
    for first in singles:
        inner = ParsedSource.parse(first.text, entry)
        for second in names[names.index(first.names[0]) + 1 :]:
            for rewrite in _apply_rewrite(second, inner, forms):
                note = f"{first.note}; {rewrite.note}"
                yield RewrittenSource((*first.names, *rewrite.names), rewrite.text, note)


def _apply_rewrite(name: str, code: ParsedSource, forms: set[str]) -> Iterator[RewrittenSource]:
    try:
        edits = list(itertools.islice(REWRITES[name](code), MAX_EDITS))
        for text, _ in edits:
            compile(text, "<proposal>", "exec")
    except (
        AssertionError,
        AttributeError,
        IndexError,
        KeyError,
        MemoryError,
        RecordError,
        RecursionError,
        SyntaxError,
        TypeError,
        ValueError,
    ) as e:
        # One rewrite that a text confuses must not cost the others.
        warnings.warn(f"the rewrite {name} is left out: {type(e).__name__}: {e}", stacklevel=2)
        return
    for text, note in edits:
        if (form := _canonical_form(text)) not in forms:
            forms.add(form)
            yield RewrittenSource((name,), text, note)


def _canonical_form(text: str) -> str:
    return ast.dump(python_parser.parse_module(text))
