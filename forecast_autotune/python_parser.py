"""`ast.parse` for threads: two at once raise `SystemError` now and then (CPython 106905, until 3.13)."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from typing import TypeVar

ParsedNode = TypeVar("ParsedNode")

_MAX_ATTEMPTS = 20
"""Other libraries' threads know nothing of the lock."""
_PARSE_LOCK = threading.Lock()


def parse_module(source: str) -> ast.Module:
    """The tree of a module's text. Raises what `ast.parse` does."""
    return _parse_locked(lambda: ast.parse(source))


def parse_expression(source: str) -> ast.expr:
    """The tree of an expression's text. Raises what `ast.parse` does."""
    return _parse_locked(lambda: ast.parse(source, mode="eval").body)


def _parse_locked(parse: Callable[[], ParsedNode]) -> ParsedNode:
    with _PARSE_LOCK:
        for _ in range(_MAX_ATTEMPTS - 1):
            try:
                return parse()
            except SystemError:
                continue
        return parse()
