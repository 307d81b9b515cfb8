"""Rewrites of whole functions, of products of matrices, and of constants at the top of a module."""

from __future__ import annotations

import ast
import copy
import itertools
import re
from collections.abc import Iterator, Mapping

from forecast_harness.authors.torch.source_code import (
    InputFacts,
    ParsedSource,
    TorchEdit,
    read_expressions,
)
from forecast_harness.authors.triton.analysis.source_unit import (
    fresh_name,
    names,
    parse_expression,
    parse_statements,
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


CHUNK_SIZES = (16, 128, 1024)
"""First guesses at rows per chunk; constants that are tuned afterwards."""


def chunk_rows(code: ParsedSource, facts: InputFacts) -> Iterator[TorchEdit]:
    """The entry calls what it was for `CHUNK` rows at a time and puts the results together.

    Which arguments have rows is told by the definition (`facts.rows`); without it nothing is done.
    """
    entry = code.entry_function
    if entry is None or not facts.rows or code.uses_autograd:
        return
    a = entry.args
    given = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    if a.vararg or a.kwarg or not set(facts.rows) <= set(given):
        return
    for rows in CHUNK_SIZES:
        draft = code.copy()
        taken = names(draft.tree) | {f.name for f in draft.functions}
        constant, inner = fresh_name("CHUNK", taken), fresh_name("part_of", taken)
        twin = draft.twin(entry)
        twin.name = inner
        passed = ", ".join(f"{n}={n}[rows]" if n in facts.rows else f"{n}={n}" for n in given)
        signature = ast.unparse(a)
        lines = [
            f"def {code.entry}({signature}):",
            f"    parts = [{inner}({passed}) for rows in "
            f"(slice(i, i + {constant}) for i in range(0, {facts.rows[0]}.shape[0], {constant}))]",
        ]
        if facts.outputs == 1:
            lines.append("    return torch.cat(parts)")
        elif facts.outputs > 1:
            lines.append("    return tuple(torch.cat(part) for part in zip(*parts))")
        # An empty first axis still needs a result of the right form: one call on nothing.
        lines[1] = lines[1].replace(
            f"{facts.rows[0]}.shape[0], {constant}))", f"max(1, {facts.rows[0]}.shape[0]), {constant}))"
        )
        draft.tree.body += parse_statements("\n".join(lines))
        insert_definition(draft.tree, f"{constant} = {rows}")
        yield TorchEdit(
            draft.text(), f"{rows} rows at a time, so that what lies between steps stays in the cache"
        )


def insert_definition(tree: ast.Module, text: str) -> None:
    """Put statements after a module's imports and docstring."""
    last = [i for i, s in enumerate(tree.body) if isinstance(s, ast.Import | ast.ImportFrom)]
    at = last[-1] + 1 if last else int(ast.get_docstring(tree) is not None)
    tree.body[at:at] = parse_statements(text)


# --- products of matrices ---


_EINSUM_EQUATION = re.compile(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]*)")


def einsum_to_matmul(code: ParsedSource, facts: InputFacts) -> Iterator[TorchEdit]:
    """An einsum of two operands as `matmul` of permuted ones: batch axes, one free axis each, one summed."""
    products: list[tuple[ast.expr, ast.expr]] = []
    for function in code.functions:
        for node in read_expressions(function):
            if (product := _as_matmul(node)) is not None:
                products.append((node, product))
    for places in [[one] for one in products] + ([products] if len(products) > 1 else []):
        draft = code.copy()
        swap_expressions(draft.tree, {id(draft.twin(old)): copy.deepcopy(new) for old, new in places})
        yield TorchEdit(draft.text(), "a product of matrices, where an einsum would find out how first")


def contiguous_operands(code: ParsedSource, facts: InputFacts) -> Iterator[TorchEdit]:
    """Results of `permute` are laid out as they are read, at each place and at all."""
    places = [
        node
        for function in code.functions
        for node in read_expressions(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "permute"
    ]
    for some in [[one] for one in places] + ([places] if len(places) > 1 else []):
        draft = code.copy()
        operands: dict[int, ast.expr] = {
            id(draft.twin(p)): ast.Call(ast.Attribute(copy.deepcopy(p), "contiguous", ast.Load()), [], [])
            for p in some
        }
        swap_expressions(draft.tree, operands)
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
    expression = parse_expression(f"_v.permute({', '.join(map(str, order))})")
    (name,) = (n for n in ast.walk(expression) if isinstance(n, ast.Name))
    return swap_expressions(ast.Expression(expression), {id(name): copy.deepcopy(value)}).body


# --- constants in upper case ---


MIN_VALUE, MAX_VALUE = 1, 1 << 20
_MAX_MIXTURES = 16
"""Most mixtures of two parents' constants."""


def constants_of(code: ParsedSource) -> Mapping[str, ast.Assign]:
    """Assignments of plain integers to names in upper case, by name; those assigned once."""
    constants: dict[str, ast.Assign] = {}
    twice = set()
    for node in code.tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, node.value
            if name.isupper() and isinstance(value, ast.Constant) and type(value.value) is int:
                twice |= {name} & set(constants)
                constants[name] = node
    return {name: node for name, node in constants.items() if name not in twice}


def values_of(code: ParsedSource) -> dict[str, int]:
    """The constants' values."""
    return {name: int(ast.literal_eval(node.value)) for name, node in constants_of(code).items()}


def with_values(code: ParsedSource, values: Mapping[str, int]) -> str:
    """The source with other values of its constants."""
    constants = constants_of(code)
    draft = code.copy()
    for name, value in values.items():
        draft.twin(constants[name]).value = ast.Constant(value)
    return draft.text()


def vary_constants(code: ParsedSource, facts: InputFacts) -> Iterator[TorchEdit]:
    """Every constant doubled, halved, and four times as large or small."""
    for name, value in values_of(code).items():
        for new in (value * 2, value // 2, value * 4, value // 4):
            if value > 0 and MIN_VALUE <= new <= MAX_VALUE and new != value:
                yield TorchEdit(with_values(code, {name: new}), f"{name} = {new} in place of {value}")


def cross_constants(code: ParsedSource, other: ParsedSource) -> Iterator[TorchEdit]:
    """A source with constants of another one that has them by the same names, all or some."""
    mine, theirs = values_of(code), values_of(other)
    differ = [name for name in mine if name in theirs and mine[name] != theirs[name]]
    mixtures = itertools.chain.from_iterable(
        itertools.combinations(differ, count) for count in range(len(differ), 0, -1)
    )
    for some in itertools.islice(mixtures, _MAX_MIXTURES):
        taken = {name: theirs[name] for name in some}
        shown = ", ".join(f"{n} = {v}" for n, v in taken.items())
        yield TorchEdit(with_values(code, taken), f"{shown} of the other parent")
