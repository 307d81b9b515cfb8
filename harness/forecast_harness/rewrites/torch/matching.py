"""Patterns of tensor expressions: `_x * torch.sigmoid(_x)` finds `a.sigmoid() * a`, through local names.

A pattern is Python in which `_a` to `_z` stand for any expression, the same one wherever the name occurs;
`_k`, `_j` for a plain number. Methods and functions of torch are the same, as are operators and their
functions, and sums and products match in either order.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from forecast_harness.rewrites.torch.code import Code, Scope, expressions
from forecast_harness.rewrites.torch.protocol import Edit
from forecast_harness.rewrites.triton.unit import expression, swap

Bound = dict[str, "Term"]

_ANY = re.compile(r"_[a-z]")
_NUMBERS = ("_k", "_j")
_OPERATORS = {
    "mul": "Mult", "multiply": "Mult", "add": "Add", "sub": "Sub", "subtract": "Sub", "div": "Div",
    "divide": "Div", "true_divide": "Div", "matmul": "MatMult", "mm": "MatMult", "bmm": "MatMult",
}  # fmt: skip
_SAME = {"pow": "Pow", "clip": "clamp", "neg": "USub", "negative": "USub", "absolute": "abs", "concat": "cat"}
_REDUCTIONS = frozenset(
    (
        "sum",
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "var",
        "std",
        "softmax",
        "log_softmax",
        "cumsum",
        "logsumexp",
    )
) | frozenset(("argmax", "argmin", "prod", "norm"))
_COMMUTE = ("Mult", "Add")
_DEEP = 12


@dataclass(frozen=True)
class Term:
    """An expression in a form in which equal things look alike; `node` is where it stands."""

    head: str
    parts: tuple[Term, ...] = ()
    node: ast.expr = field(default_factory=lambda: ast.Constant(None), compare=False, repr=False)


@dataclass(frozen=True)
class Rule:
    """A pattern and what may stand in its place."""

    name: str
    pattern: str
    instead: str
    note: str
    scalar: tuple[str, ...] = ()
    """Of the pattern's names, those that must be plain numbers or sizes."""
    tensor: tuple[str, ...] = ()
    """Those that must not be."""
    together: bool = False
    """Whether it only makes sense at all places of a source at once."""


def term_of(node: ast.expr, modules: Mapping[str, str]) -> Term:
    """The form of an expression."""

    def form(inner: ast.expr) -> Term:
        return term_of(inner, modules)

    if isinstance(node, ast.Name):
        return Term(f"name:{node.id}", (), node)
    if isinstance(node, ast.Constant):
        number = isinstance(node.value, int | float) and not isinstance(node.value, bool)
        value = float(ast.literal_eval(node)) if number else node.value
        return Term(f"constant:{value!r}", (), node)
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Pow) and isinstance(node.right, ast.Constant) and node.right.value == 2:
            return Term("square", (form(node.left),), node)
        return Term(type(node.op).__name__, (form(node.left), form(node.right)), node)
    if isinstance(node, ast.UnaryOp):
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return Term(f"constant:-{form(node.operand).head.partition(':')[2]}", (), node)
        return Term(type(node.op).__name__, (form(node.operand),), node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
        return _call(node, modules)
    if isinstance(node, ast.Attribute):
        return Term(f".{node.attr}", (form(node.value),), node)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return Term(type(node.ops[0]).__name__, (form(node.left), form(node.comparators[0])), node)
    if isinstance(node, ast.Subscript):
        return Term("item", (form(node.value), form(node.slice)), node)
    if isinstance(node, ast.Tuple | ast.List):
        return Term("tuple", tuple(form(e) for e in node.elts), node)
    return Term(f"other:{ast.dump(node)}", (), node)


def _call(node: ast.Call, modules: Mapping[str, str]) -> Term:
    written = ast.unparse(node.func)
    first, _, rest = written.partition(".")
    plain = not re.search(r"[^\w.]", written)
    dotted = f"{modules[first]}.{rest}".rstrip(".") if plain and first in modules else ""
    given = list(node.args)
    if dotted.startswith("torch.nn.functional."):
        name = dotted.removeprefix("torch.nn.functional.")
        head = name if name in ("softmax", "log_softmax", "sigmoid", "tanh", "relu") else f"F.{name}"
    elif dotted.startswith("torch."):
        head = dotted.removeprefix("torch.").removeprefix("special.")
    elif dotted or isinstance(node.func, ast.Name):
        head = f"call:{dotted or written}"
    else:
        assert isinstance(node.func, ast.Attribute)
        head, given = node.func.attr, [node.func.value, *given]
    head = _SAME.get(head, head)
    named = {k.arg or "**": k.value for k in node.keywords}
    if head in _REDUCTIONS:
        if len(given) == 1 and "dim" in named:
            given.append(named.pop("dim"))
        if len(given) == 3 and head not in ("var", "std", "norm"):
            named["keepdim"] = given.pop()
    if head in _OPERATORS and len(given) == 2 and not named:
        head = _OPERATORS[head]
    if head == "Pow" and len(given) == 2 and isinstance(given[1], ast.Constant) and given[1].value == 2:
        head, given = "square", given[:1]
    keywords = tuple(Term(f"{k}=", (term_of(v, modules),), v) for k, v in sorted(named.items()))
    return Term(head, (*(term_of(g, modules) for g in given), *keywords), node)


class Matcher:
    """Matches patterns in one function."""

    def __init__(self, code: Code, scope: Scope) -> None:
        self.modules = code.modules
        self.scope = scope

    def matches(self, rule: Rule, node: ast.expr) -> Bound | None:
        """What the names of a rule's pattern stand for, or None where it does not apply."""
        for bound in self._match(pattern_of(rule.pattern), term_of(node, self.modules), {}, 0):
            plain = [self.scope.scalar(bound[n].node) for n in rule.scalar]
            if all(plain) and not any(self.scope.scalar(bound[n].node) for n in rule.tensor):
                return bound
        return None

    def same(self, a: Term, b: Term) -> bool:
        """Whether two expressions have one value, as far as names that never change show."""
        return a == b or self._open(a) == self._open(b)

    def _open(self, term: Term, depth: int = 0) -> Term:
        if term.head.startswith("name:") and depth < _DEEP:
            meant = self._meaning(term)
            return term if meant is None else self._open(meant, depth + 1)
        return Term(term.head, tuple(self._open(p, depth) for p in term.parts))

    def _meaning(self, term: Term) -> Term | None:
        found = self.scope.definitions.get(term.head.partition(":")[2])
        return None if found is None else term_of(found, self.modules)

    def _match(self, pattern: Term, term: Term, bound: Bound, depth: int) -> Iterator[Bound]:
        if depth > _DEEP:
            return
        name = pattern.head.partition(":")[2]
        if pattern.head.startswith("name:") and _ANY.fullmatch(name):
            if name in _NUMBERS and not re.fullmatch(r"constant:-?[\d.e+-]+", term.head):
                return
            if name not in bound:
                yield {**bound, name: term}
            elif self.same(bound[name], term):
                yield bound
            return
        if pattern.head == term.head and len(pattern.parts) == len(term.parts):
            yield from self._parts(pattern.parts, term.parts, bound, depth)
            if pattern.head in _COMMUTE:
                yield from self._parts(pattern.parts, term.parts[::-1], bound, depth)
            return
        if pattern.head == "square" and term.head == "Mult" and self.same(*term.parts):
            yield from self._match(pattern.parts[0], term.parts[0], bound, depth + 1)
        elif term.head.startswith("name:") and (meant := self._meaning(term)) is not None:
            yield from self._match(pattern, meant, bound, depth + 1)

    def _parts(
        self, patterns: tuple[Term, ...], terms: tuple[Term, ...], bound: Bound, depth: int
    ) -> Iterator[Bound]:
        if not patterns:
            yield bound
            return
        for found in self._match(patterns[0], terms[0], bound, depth + 1):
            yield from self._parts(patterns[1:], terms[1:], found, depth)


@cache
def pattern_of(text: str) -> Term:
    """The form of a pattern's text."""
    return term_of(expression(text), {"torch": "torch", "F": "torch.nn.functional"})


def filled(text: str, bound: Mapping[str, Term]) -> ast.expr:
    """An expression from its text, with a pattern's names replaced by what they stand for."""
    made = expression(text)
    names = [n for n in ast.walk(made) if isinstance(n, ast.Name) and n.id in bound]
    return swap(ast.Expression(made), {id(n): copy.deepcopy(bound[n.id].node) for n in names}).body


def rewritten(code: Code, rule: Rule) -> Iterator[Edit]:
    """One edit per place where a rule applies, and one of all places if there are several."""
    found: list[tuple[ast.expr, ast.expr]] = []
    for function in code.functions:
        matcher = Matcher(code, Scope(code, function))
        for node in expressions(function):
            bound = None if isinstance(node, ast.Name) else matcher.matches(rule, node)
            if bound is not None:
                found.append((node, filled(rule.instead, bound)))
    alone = [] if rule.together else [[one] for one in found]
    for places in alone + ([found] if found and (rule.together or len(found) > 1) else []):
        draft = code.copy()
        swap(draft.tree, {id(draft.twin(old)): copy.deepcopy(new) for old, new in places})
        yield Edit(draft.text(), rule.note)
