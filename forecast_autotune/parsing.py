"""`ast.parse` for threads: two at once raise `SystemError` now and then (CPython 106905, until 3.13)."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from typing import TypeVar

Tree = TypeVar("Tree")

_TRIES = 20
"""Other libraries' threads know nothing of the lock."""
_alone = threading.Lock()


def module(source: str) -> ast.Module:
    """The tree of a module's text. Raises what `ast.parse` does."""
    return _read(lambda: ast.parse(source))


def expression(source: str) -> ast.expr:
    """The tree of an expression's text. Raises what `ast.parse` does."""
    return _read(lambda: ast.parse(source, mode="eval").body)


def _read(parse: Callable[[], Tree]) -> Tree:
    with _alone:
        for _ in range(_TRIES - 1):
            try:
                return parse()
            except SystemError:
                continue
        return parse()
