"""Inductor's size hints, replaced for a while: what it would do if the first call had had other sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

Symbol: TypeAlias = Any
"""A sympy symbol that stands for a size."""

_HINT_METHODS = ("optimization_hint", "size_hint")
"""Methods that every other question for hints goes through: one of them until torch 2.9, both or the first later."""


@contextlib.contextmanager
def replaced_hints(values: Mapping[Symbol, int]) -> Iterator[None]:
    """While it lasts, the active graph's hints are those of these values of its symbols.

    Only hints are answered so. What is guarded on is evaluated with the sizes that were met, as ever, so no guard
    comes of it. Raises `LookupError` where this release of torch asks for hints in another way.
    """
    from torch._inductor.virtualized import V

    sizes: Any = V.graph.sizevars
    names = [name for name in _HINT_METHODS if hasattr(type(sizes), name)]
    before = {name: vars(sizes)[name] for name in names if name in vars(sizes)}
    for name in names:
        setattr(sizes, name, _with_values(sizes, getattr(sizes, name), values))
    try:
        ask = getattr(sizes, "optimization_hints", None) or sizes.size_hints
        if tuple(ask(list(values))) != tuple(values.values()):
            raise LookupError("this release of torch has other size hints than those that are known")
        yield
    finally:
        for name in names:
            if name in before:
                setattr(sizes, name, before[name])
            else:
                delattr(sizes, name)


def _with_values(sizes: Any, original: Any, values: Mapping[Symbol, int]) -> Any:
    def hint(expr: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(expr, "free_symbols", None):
            # A symbol may stand for a precomputed size, or be equal to another one.
            expr = sizes.simplify(sizes.remove_precomputed_replacements(expr))
            if getattr(expr, "free_symbols", None):
                expr = expr.xreplace(dict(values))
        return original(expr, *args, **kwargs)

    return hint
