"""Is a proposal new? Decided from its text alone, before anything is paid for it.

Two questions. `node_identity` is a node's name: the same program up to comments, docstrings, layout. `signature`
tells programs that a compiler cannot tell apart either: the token 5-grams of the canonical text, in which
local names are numbered in order of appearance, functions and imports stand in a fixed order, keyword
arguments are sorted, and plain annotations are left out. A proposal whose 5-grams (counted) are those of an
accepted node is a near-duplicate: Jaccard similarity 1.

Why 1 and no lower threshold: every token is in five 5-grams, so one changed tile size leaves a kernel of 400
tokens 0.975 similar and one of 2000 tokens 0.995; swapped `offs_m` and `offs_n`, the commonest repair, no
less. A threshold below 1 that refuses paraphrases refuses exactly the experiments that a search is made of.
Names and layout are all that may differ for free. Statements in another order are new: where a load stands
decides what it overlaps with.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from forecast_autotune import python_parser
from forecast_autotune.records import digest
from forecast_harness.records import Node
from forecast_harness.targets.cuda.source import launch_comments

NGRAM_LENGTH = 5
_PYTHON_LANGUAGES = ("torch", "triton", "python")
_C_LANGUAGES = ("cuda", "c++", "cpp", "c", "hip")


class NoveltyFilter:
    """The nodes accepted so far, and whether another one adds to them."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._signatures: dict[str, str] = {}

    def add(self, node: Node) -> tuple[str, str] | None:
        """Accept a node: None. Or refuse it: the id of the accepted node that it repeats, and how."""
        if node.id in self._ids:
            return node.id, "the same program"
        known = signature(node.language, node.source)
        like = self._signatures.setdefault(known, node.id)
        if like != node.id:
            return like, "the same up to names and order of definitions"
        self._ids.add(node.id)
        return None


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


@lru_cache(maxsize=4096)
def signature(language: str, source: str) -> str:
    """Equal for near-duplicates (see the module) and, up to chance, for nothing else."""
    grams = Counter(shingles(canonical_tokens(language, source)))
    return digest(language, sorted((list(gram), count) for gram, count in grams.items()))


def shingles(tokens: Sequence[str]) -> Iterable[tuple[str, ...]]:
    """All runs of five tokens; the whole text where it is shorter."""
    return (tuple(tokens[i : i + NGRAM_LENGTH]) for i in range(max(1, len(tokens) - NGRAM_LENGTH + 1)))


@lru_cache(maxsize=1024)
def canonical_tokens(language: str, source: str) -> tuple[str, ...]:
    """The tokens of a source as `signature` compares them."""
    if language in _PYTHON_LANGUAGES:
        try:
            tree = _without_docstrings(python_parser.parse_module(source))
            text = ast.unparse(_Canonicalizer(tree).visit(tree))
            return tuple(t.string for t in tokenize.generate_tokens(io.StringIO(text).readline))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return tuple(source.split())
    if language in _C_LANGUAGES:
        return tuple(_number_variables(list(_c_tokens(source))))
    return tuple(source.split())


# --- Python ---


def _without_docstrings(tree: ast.Module) -> ast.Module:
    """Without docstrings, in place. Comments and positions are not part of what is compared anyway."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            value = first.value if isinstance(first, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                node.body = node.body[1:] or [ast.Pass()]
    return tree


class _Canonicalizer(ast.NodeTransformer):
    """Number the local names of functions; sort imports, definitions and keywords; drop annotations.

    A local name is one that a function binds; parameters that are passed by keyword anywhere, and the names
    of functions and classes, stay as they are: callers use them.
    """

    def __init__(self, tree: ast.Module) -> None:
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
        self._keywords = {k.arg for call in calls for k in call.keywords if k.arg}
        constants = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
        self._keywords |= {c for c in constants if isinstance(c, str)}
        self._names: list[dict[str, str]] = []

    def visit_Module(self, node: ast.Module) -> ast.AST:
        """Top level: imports first, then all else; runs of definitions are sorted."""
        self.generic_visit(node)
        imports = [s for s in node.body if isinstance(s, ast.Import | ast.ImportFrom)]
        others = [s for s in node.body if not isinstance(s, ast.Import | ast.ImportFrom)]
        node.body = sorted(imports, key=ast.dump) + _sorted_runs(others)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """A new scope, within the one around it."""
        kept = {n for s in ast.walk(node) if isinstance(s, ast.Global | ast.Nonlocal) for n in s.names}
        known = dict(self._names[-1]) if self._names else {}
        passed = [name for name in _parameters(node) if name not in self._keywords]
        kept |= set(_parameters(node)) - set(passed)
        for name in dict.fromkeys([*passed, *_assigned_names(node)]):
            if name not in known and name not in kept:
                known[name] = f"v{len(known)}"
        decorated = [self.visit(d) for d in node.decorator_list]
        self._names.append(known)
        node.decorator_list = []
        self.generic_visit(node)
        self._names.pop()
        node.decorator_list = decorated
        node.returns = None
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Renamed where it is local."""
        if self._names:
            node.id = self._names[-1].get(node.id, node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        """Renamed where it is local; `tl.constexpr` is the one annotation that means something."""
        if self._names:
            node.arg = self._names[-1].get(node.arg, node.arg)
        if node.annotation is not None and "constexpr" not in ast.dump(node.annotation):
            node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """A plain assignment, unless the annotation is `constexpr` or all that there is."""
        self.generic_visit(node)
        if node.value is None or "constexpr" in ast.dump(node.annotation):
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Keywords in alphabetical order; what comes of `**` stays last."""
        self.generic_visit(node)
        node.keywords.sort(key=lambda k: (k.arg is None, k.arg or ""))
        return node


def _parameters(function: ast.FunctionDef) -> list[str]:
    a = function.args
    parameters = [*a.posonlyargs, *a.args, *([a.vararg] if a.vararg else []), *a.kwonlyargs]
    return [p.arg for p in (*parameters, *([a.kwarg] if a.kwarg else []))]


def _assigned_names(function: ast.FunctionDef) -> list[str]:
    """Names that a function assigns to, in order of appearance."""
    stored = [n for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return [n.id for n in sorted(stored, key=lambda n: (n.lineno, n.col_offset))]


def _sorted_runs(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Neighbouring definitions in a fixed order: it does not matter which of them stands first."""
    runs: list[ast.stmt] = []
    run: list[ast.FunctionDef] = []
    for statement in body:
        if isinstance(statement, ast.FunctionDef):
            run.append(statement)
        else:
            runs += [*sorted(run, key=lambda f: f.name), statement]
            run = []
    return [*runs, *sorted(run, key=lambda f: f.name)]


# --- C and C++ ---

_C_TOKEN = re.compile(
    r"""(?P<skip>//[^\n]*|/\*.*?(?:\*/|\Z)|\\\n|\s+)|R"\((?:.*?)(?:\)"|\Z)|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'"""
    r"""|[A-Za-z_]\w*|\.?\d(?:[eEpP][+-]|[\w.'])*|<<<|>>>|::|->|\+\+|--|<<=|>>=|[-+*/%&|^!=<>]=|<<|>>|&&|\|\||.""",
    re.DOTALL,
)
_C_TYPES = re.compile(
    r"auto|bool|char|double|(?:float|int|uint|long|half)[1-8]?|short|(un)?signed|size_t|u?int(?:8|16|32|64)_t|"
    r"__half2?|__nv_bfloat162?|const|constexpr|volatile|(?:__)?restrict(?:__)?"
)
_C_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def _c_tokens(source: str) -> Iterable[str]:
    """Without comments and white space; a preprocessor line ends with a token of its own.

    The comment that says how a kernel is launched is no mere comment: its words come first.
    """
    lines = re.sub(r"(?m)^([ \t]*#(?:[^\n\\]|\\\n|\\.)*)$", "\\1 \x00", source)
    launches = [word for text in launch_comments(source) for word in text.split()]
    return [*launches, *(m.group() for m in _C_TOKEN.finditer(lines) if m.lastgroup != "skip")]


def _number_variables(tokens: list[str]) -> list[str]:
    """Variables declared with a plain type are numbered in order of declaration, functions are not."""
    names: dict[str, str] = {}
    typed = False
    for token, after in zip(tokens, [*tokens[1:], ""], strict=False):
        if _C_TYPES.fullmatch(token) or (typed and token in ("*", "&")):
            typed = True
        elif typed and _C_IDENTIFIER.fullmatch(token) and after != "(":
            names.setdefault(token, f"v{len(names)}")
            typed = False
        else:
            typed = False
    return [_renamed_token(tokens, i, names) for i in range(len(tokens))]


def _renamed_token(tokens: Sequence[str], i: int, names: Mapping[str, str]) -> str:
    """`a.x` and `a->x` name a field, whatever else is called x."""
    return tokens[i] if i and tokens[i - 1] in (".", "->") else names.get(tokens[i], tokens[i])
