"""Is a proposal new? Decided from its text alone, before anything is paid for it.

`node_identity` is a node's name: the same program up to comments, docstrings, layout. Names and the order of statements
and definitions count: where a load stands decides what it overlaps with.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable
from functools import lru_cache

from forecast_autotune import python_parser
from forecast_autotune.records import digest
from forecast_harness.targets.cuda.source import launch_comments

_PYTHON_LANGUAGES = ("torch", "triton", "python")
_C_LANGUAGES = ("cuda", "c++", "cpp", "c", "hip")


@lru_cache(maxsize=4096)
def node_identity(target_id: str, language: str, source: str) -> str:
    """A node's id: digest of the target, the language and the source without comments and layout.

    Local names count. Text that is no program of its language is taken word by word.
    """
    if language in _PYTHON_LANGUAGES:
        try:
            return digest(
                target_id, language, ast.dump(_without_docstrings(python_parser.parse_module(source)))
            )
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return digest(target_id, language, source.split())
    return digest(
        target_id, language, list(_c_tokens(source)) if language in _C_LANGUAGES else source.split()
    )


@lru_cache(maxsize=1024)
def source_tokens(language: str, source: str) -> tuple[str, ...]:
    """The tokens of a source without comments and docstrings, for forecasts from its text."""
    if language in _PYTHON_LANGUAGES:
        try:
            text = ast.unparse(_without_docstrings(python_parser.parse_module(source)))
            return tuple(t.string for t in tokenize.generate_tokens(io.StringIO(text).readline))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return tuple(source.split())
    return tuple(_c_tokens(source)) if language in _C_LANGUAGES else tuple(source.split())


def _without_docstrings(tree: ast.Module) -> ast.Module:
    """Remove docstrings, in place. Comments and positions are in no comparison anyway."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            value = first.value if isinstance(first, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                node.body = node.body[1:] or [ast.Pass()]
    return tree


_C_TOKEN = re.compile(
    r"""(?P<skip>//[^\n]*|/\*.*?(?:\*/|\Z)|\\\n|\s+)|R"\((?:.*?)(?:\)"|\Z)|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'"""
    r"""|[A-Za-z_]\w*|\.?\d(?:[eEpP][+-]|[\w.'])*|<<<|>>>|::|->|\+\+|--|<<=|>>=|[-+*/%&|^!=<>]=|<<|>>|&&|\|\||.""",
    re.DOTALL,
)


def _c_tokens(source: str) -> Iterable[str]:
    """Without comments and white space; a preprocessor line ends with a token of its own.

    The comment that says how a kernel is launched is no mere comment: its words come first.
    """
    lines = re.sub(r"(?m)^([ \t]*#(?:[^\n\\]|\\\n|\\.)*)$", "\\1 \x00", source)
    launches = [word for text in launch_comments(source) for word in text.split()]
    return [*launches, *(m.group() for m in _C_TOKEN.finditer(lines) if m.lastgroup != "skip")]
