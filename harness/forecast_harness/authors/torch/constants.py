"""Constants in upper case at the top of a module: other values, and values of another parent."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping

from forecast_harness.authors.torch.protocol import InputFacts, TorchEdit
from forecast_harness.authors.torch.source_code import ParsedSource

MIN_VALUE, MAX_VALUE = 1, 1 << 20
_MAX_MIXTURES = 16
"""Most mixtures of two parents' constants."""


def constants_of(code: ParsedSource) -> Mapping[str, ast.Assign]:
    """Assignments of plain integers to names in upper case, by name; those assigned once."""
    found: dict[str, ast.Assign] = {}
    twice = set()
    for node in code.tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, node.value
            if name.isupper() and isinstance(value, ast.Constant) and type(value.value) is int:
                twice |= {name} & set(found)
                found[name] = node
    return {name: node for name, node in found.items() if name not in twice}


def values_of(code: ParsedSource) -> dict[str, int]:
    """The constants' values."""
    return {name: int(ast.literal_eval(node.value)) for name, node in constants_of(code).items()}


def with_values(code: ParsedSource, values: Mapping[str, int]) -> str:
    """The source with other values of its constants."""
    found = constants_of(code)
    draft = code.copy()
    for name, value in values.items():
        draft.twin(found[name]).value = ast.Constant(value)
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
