"""`ast.parse` for texts that others wrote: within limits, with one error, and safe for threads.

CPython's parser answers some texts with `MemoryError` or `RecursionError`, and trees that are too deep make every
function that visits them fail later on. So what is too long or too deep is refused here, before the parser
sees it where a linear look suffices, and afterwards by the depth of the tree.
"""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from forecast_autotune.errors import ForecastAutotuneError

ParsedNode = TypeVar("ParsedNode", bound=ast.AST)

MAX_SOURCE_CHARACTERS = 1 << 20
"""More than twice the longest module of torch; parsed, a text takes some hundred times its size."""
MAX_TOKENS = 200_000
"""About as many as fit into such a text when it is written by people."""
MAX_BRACKET_DEPTH = 64
"""Code that people wrote has less than 20; the parser's time may double with every further level."""
MAX_PREFIXES = 64
"""Prefix operators in a row (`- - -1`, `not not x`, `lambda: lambda: x`)."""
MAX_TREE_DEPTH = 128
"""The deepest tree of 1,904 modules of torch, Triton and this project has 27 levels. `copy.deepcopy`, which takes
most frames a level, gets through so many within Python's usual limit of 1,000."""
MAX_FORMATTED_CHARACTERS = 1 << 16
"""The most fields of one f-string: CPython 3.11 takes time quadratic in the number of its fields."""
MAX_DIGITS = 1000
"""The most digits of one number, in any base: those beyond 4,300 decimal digits cannot be written out again."""
_MAX_ATTEMPTS = 20
"""Other libraries' threads know nothing of the lock."""
_PARSE_LOCK = threading.Lock()

# Every alternative begins with other characters or can only fail at once, so that matching takes linear time:
# an unfinished string is skipped to its line's end, or to the text's if it has three quotes.
_TOKEN = re.compile(
    r"""(?P<space>[ \t\f\r\n\\]+|\#[^\n]*)"""
    r'''|(?P<string>\w*(?:"""(?:[^"\\]|\\.|"(?!""))*(?:"""|\Z)'''
    r"""|'''(?:[^'\\]|\\.|'(?!''))*(?:'''|\Z)"""
    r"""|"(?:[^"\\\n]|\\.)*(?:"|(?=\n)|\\?\Z)"""
    r"""|'(?:[^'\\\n]|\\.)*(?:'|(?=\n)|\\?\Z)))"""
    r"""|(?P<prefix>[-+~*]|\b(?:not|lambda|await|yield|from)\b)|(?P<word>\w+)"""
    r"""|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<other>.)""",
    re.DOTALL,
)


class SourceTextError(ForecastAutotuneError, SyntaxError):
    """A text that is no Python, or that is too long or too deep to be looked at."""


def parse_module(source: str) -> ast.Module:
    """The tree of a module's text, whoever wrote it.

    Raises `SourceTextError`, a `SyntaxError`, for all that is no Python (NUL characters and lone surrogates
    included), and for a text beyond the limits: characters (of all of it, and of one f-string), digits of a
    number, tokens, brackets in each other, prefix operators in a row, levels of the tree.
    """
    return _parse_within_limits(source, lambda: ast.parse(source))


def parse_expression(source: str) -> ast.expr:
    """The tree of an expression's text. Raises what `parse_module` does."""
    return _parse_within_limits(source, lambda: ast.parse(source, mode="eval").body)


def parse_literal(source: str) -> Any:
    """The value of a literal's text. Raises what `parse_module` does, and `ValueError` for what is no literal."""
    try:
        return ast.literal_eval(parse_expression(source.lstrip(" \t")))
    except (TypeError, RecursionError, MemoryError) as error:  # a list as a key of a dictionary, say
        raise ValueError(f"it is no literal: {error or type(error).__name__}") from error


def _parse_within_limits(source: str, parse: Callable[[], ParsedNode]) -> ParsedNode:
    if message := _excess(source):
        raise SourceTextError(message)
    try:
        tree = _parse_locked(parse)
    except SyntaxError as error:
        raise SourceTextError(*error.args) from error
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise SourceTextError(f"the parser gave up: {error or type(error).__name__}") from error
    if _is_deep(tree):
        raise SourceTextError(
            f"its tree has more than {MAX_TREE_DEPTH} levels; split its longest expressions"
        )
    return tree


def _excess(source: str) -> str:
    """Which limit a text exceeds; '' if none. One look from its begin to its end."""
    if len(source) > MAX_SOURCE_CHARACTERS:
        return f"it has {len(source)} characters; at most {MAX_SOURCE_CHARACTERS} are read"
    if "\0" in source:
        return "source code cannot contain null bytes"
    if not source.isascii() and (lone := re.search("[\ud800-\udfff]", source)):
        return f"character {lone.start()} is a lone surrogate, which no encoding holds"
    tokens = depth = prefixes = 0
    for token in _TOKEN.finditer(source):
        kind = token.lastgroup
        if kind == "space":
            continue
        tokens += 1
        prefixes = prefixes + 1 if kind == "prefix" or (prefixes and token.group() == ":") else 0
        if kind == "open":
            depth += 1
        elif kind == "close":
            depth = max(0, depth - 1)
        elif kind == "word" and len(token.group()) > MAX_DIGITS and token.group()[0].isdigit():
            return f"a number has more than {MAX_DIGITS} digits"
        elif (
            kind == "string"
            and len(token.group()) > MAX_FORMATTED_CHARACTERS
            and _is_formatted(token.group())
        ):
            return f"an f-string has more than {MAX_FORMATTED_CHARACTERS} characters"
        if depth > MAX_BRACKET_DEPTH:
            return f"more than {MAX_BRACKET_DEPTH} brackets lie in each other"
        if prefixes > 2 * MAX_PREFIXES:
            return f"more than {MAX_PREFIXES} prefix operators follow each other"
        if tokens > MAX_TOKENS:
            return f"it has more than {MAX_TOKENS} tokens"
    return ""


def _is_formatted(token: str) -> bool:
    return "f" in token[:8].lower().partition("'")[0].partition('"')[0]


def _is_deep(tree: ast.AST) -> bool:
    level: list[ast.AST] = [tree]
    for _ in range(MAX_TREE_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return False
    return True


def _parse_locked(parse: Callable[[], ParsedNode]) -> ParsedNode:
    # Two at once raise `SystemError` now and then (CPython 106905, until 3.13).
    with _PARSE_LOCK:
        for _ in range(_MAX_ATTEMPTS - 1):
            try:
                return parse()
            except SystemError:
                continue
        return parse()
