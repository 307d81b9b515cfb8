"""Patterns of tensor expressions, and the rules that put cheaper or fused operations in their place.

`_x * torch.sigmoid(_x)` finds `a.sigmoid() * a`, through local names. A pattern is Python in which `_a` to `_z` stand
for any expression, the same one wherever the name occurs; `_k`, `_j` for a plain number. Methods and functions of torch
are the same, as are operators and their functions, and sums and products match in either order.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from forecast_autotune.python_parser import parse_expression
from forecast_harness.authors.torch.source_code import (
    FunctionScope,
    ParsedSource,
    TextEdit,
    read_expressions,
)
from forecast_harness.authors.triton.analysis.source_unit import swap_expressions

Bindings = dict[str, "ExpressionTerm"]

_PATTERN_NAME = re.compile(r"_[a-z]")
_NUMBER_NAMES = ("_k", "_j")
_OPERATORS = {
    "mul": "Mult", "multiply": "Mult", "add": "Add", "sub": "Sub", "subtract": "Sub", "div": "Div",
    "divide": "Div", "true_divide": "Div", "matmul": "MatMult", "mm": "MatMult", "bmm": "MatMult",
}  # fmt: skip
_SYNONYMS = {
    "pow": "Pow",
    "clip": "clamp",
    "neg": "USub",
    "negative": "USub",
    "absolute": "abs",
    "concat": "cat",
}
_REDUCTIONS = frozenset(
    [
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
    ]
) | frozenset(("argmax", "argmin", "prod", "norm"))
_COMMUTATIVE = ("Mult", "Add")
_MAX_DEPTH = 12


@dataclass(frozen=True)
class ExpressionTerm:
    """An expression in a form in which equal things look alike; `node` is where it stands."""

    head: str
    parts: tuple[ExpressionTerm, ...] = ()
    node: ast.expr = field(default_factory=lambda: ast.Constant(None), compare=False, repr=False)


@dataclass(frozen=True)
class RewriteRule:
    """A pattern and what may stand in its place."""

    name: str
    pattern: str
    replacement: str
    note: str
    all_places_only: bool = False
    """Whether it only makes sense at all places of a source at once."""


def term_of(node: ast.expr, modules: Mapping[str, str]) -> ExpressionTerm:
    """The form of an expression."""

    def form(inner: ast.expr) -> ExpressionTerm:
        return term_of(inner, modules)

    if isinstance(node, ast.Name):
        return ExpressionTerm(f"name:{node.id}", (), node)
    if isinstance(node, ast.Constant):
        number = isinstance(node.value, int | float) and not isinstance(node.value, bool)
        value = float(ast.literal_eval(node)) if number else node.value
        return ExpressionTerm(f"constant:{value!r}", (), node)
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Pow) and isinstance(node.right, ast.Constant) and node.right.value == 2:
            return ExpressionTerm("square", (form(node.left),), node)
        return ExpressionTerm(type(node.op).__name__, (form(node.left), form(node.right)), node)
    if isinstance(node, ast.UnaryOp):
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return ExpressionTerm(f"constant:-{form(node.operand).head.partition(':')[2]}", (), node)
        return ExpressionTerm(type(node.op).__name__, (form(node.operand),), node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
        return _call_term(node, modules)
    if isinstance(node, ast.Attribute):
        return ExpressionTerm(f".{node.attr}", (form(node.value),), node)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return ExpressionTerm(type(node.ops[0]).__name__, (form(node.left), form(node.comparators[0])), node)
    if isinstance(node, ast.Subscript):
        return ExpressionTerm("item", (form(node.value), form(node.slice)), node)
    if isinstance(node, ast.Tuple | ast.List):
        return ExpressionTerm("tuple", tuple(form(e) for e in node.elts), node)
    return ExpressionTerm(f"other:{ast.dump(node)}", (), node)


def _call_term(node: ast.Call, modules: Mapping[str, str]) -> ExpressionTerm:
    text = ast.unparse(node.func)
    first, _, rest = text.partition(".")
    plain = not re.search(r"[^\w.]", text)
    path = f"{modules[first]}.{rest}".rstrip(".") if plain and first in modules else ""
    args = list(node.args)
    if path.startswith("torch.nn.functional."):
        name = path.removeprefix("torch.nn.functional.")
        head = name if name in ("softmax", "log_softmax", "sigmoid", "tanh", "relu") else f"F.{name}"
    elif path.startswith("torch."):
        head = path.removeprefix("torch.").removeprefix("special.")
    elif path or isinstance(node.func, ast.Name):
        head = f"call:{path or text}"
    else:
        assert isinstance(node.func, ast.Attribute)
        head, args = node.func.attr, [node.func.value, *args]
    head = _SYNONYMS.get(head, head)
    options = {k.arg or "**": k.value for k in node.keywords}
    if head in _REDUCTIONS:
        if len(args) == 1 and "dim" in options:
            args.append(options.pop("dim"))
        if len(args) == 3 and head not in ("var", "std", "norm"):
            options["keepdim"] = args.pop()
    if head in _OPERATORS and len(args) == 2 and not options:
        head = _OPERATORS[head]
    if head == "Pow" and len(args) == 2 and isinstance(args[1], ast.Constant) and args[1].value == 2:
        head, args = "square", args[:1]
    keywords = tuple(ExpressionTerm(f"{k}=", (term_of(v, modules),), v) for k, v in sorted(options.items()))
    return ExpressionTerm(head, (*(term_of(g, modules) for g in args), *keywords), node)


class PatternMatcher:
    """Matches patterns in one function."""

    def __init__(self, code: ParsedSource, scope: FunctionScope) -> None:
        self.modules = code.modules
        self.scope = scope

    def matches(self, rule: RewriteRule, node: ast.expr) -> Bindings | None:
        """The expressions that the names of a rule's pattern stand for, or None where it does not apply."""
        return next(self._match(parse_pattern(rule.pattern), term_of(node, self.modules), {}, 0), None)

    def same(self, a: ExpressionTerm, b: ExpressionTerm) -> bool:
        """Whether two expressions have one value, as far as names that never change show."""
        return a == b or self._expand(a) == self._expand(b)

    def _expand(self, term: ExpressionTerm, depth: int = 0) -> ExpressionTerm:
        if term.head.startswith("name:") and depth < _MAX_DEPTH:
            definition = self._definition_of(term)
            return term if definition is None else self._expand(definition, depth + 1)
        return ExpressionTerm(term.head, tuple(self._expand(p, depth) for p in term.parts))

    def _definition_of(self, term: ExpressionTerm) -> ExpressionTerm | None:
        definition = self.scope.definitions.get(term.head.partition(":")[2])
        return None if definition is None else term_of(definition, self.modules)

    def _match(
        self, pattern: ExpressionTerm, term: ExpressionTerm, bound: Bindings, depth: int
    ) -> Iterator[Bindings]:
        if depth > _MAX_DEPTH:
            return
        name = pattern.head.partition(":")[2]
        if pattern.head.startswith("name:") and _PATTERN_NAME.fullmatch(name):
            if name in _NUMBER_NAMES and not re.fullmatch(r"constant:-?[\d.e+-]+", term.head):
                return
            if name not in bound:
                yield {**bound, name: term}
            elif self.same(bound[name], term):
                yield bound
            return
        if pattern.head == term.head and len(pattern.parts) == len(term.parts):
            yield from self._parts(pattern.parts, term.parts, bound, depth)
            if pattern.head in _COMMUTATIVE:
                yield from self._parts(pattern.parts, term.parts[::-1], bound, depth)
            return
        if pattern.head == "square" and term.head == "Mult" and self.same(*term.parts):
            yield from self._match(pattern.parts[0], term.parts[0], bound, depth + 1)
        elif term.head.startswith("name:") and (definition := self._definition_of(term)) is not None:
            yield from self._match(pattern, definition, bound, depth + 1)

    def _parts(
        self,
        patterns: tuple[ExpressionTerm, ...],
        terms: tuple[ExpressionTerm, ...],
        bound: Bindings,
        depth: int,
    ) -> Iterator[Bindings]:
        if not patterns:
            yield bound
            return
        for bindings in self._match(patterns[0], terms[0], bound, depth + 1):
            yield from self._parts(patterns[1:], terms[1:], bindings, depth)


@cache
def parse_pattern(text: str) -> ExpressionTerm:
    """The form of a pattern's text."""
    return term_of(parse_expression(text), {"torch": "torch", "F": "torch.nn.functional"})


def instantiate_pattern(text: str, bound: Mapping[str, ExpressionTerm]) -> ast.expr:
    """An expression from its text, with a pattern's names replaced by what they stand for."""
    expression = parse_expression(text)
    names = [n for n in ast.walk(expression) if isinstance(n, ast.Name) and n.id in bound]
    return swap_expressions(
        ast.Expression(expression), {id(n): copy.deepcopy(bound[n.id].node) for n in names}
    ).body


def apply_rule(code: ParsedSource, rule: RewriteRule) -> Iterator[TextEdit]:
    """One edit per place where a rule applies, and one of all places if there are several."""
    matches: list[tuple[ast.expr, ast.expr]] = []
    for function in code.functions:
        matcher = PatternMatcher(code, FunctionScope(code, function))
        for node in read_expressions(function):
            bound = None if isinstance(node, ast.Name) else matcher.matches(rule, node)
            if bound is not None:
                matches.append((node, instantiate_pattern(rule.replacement, bound)))
    return code.replaced(matches, rule.note, alone=not rule.all_places_only)


# --- the same value by other operations ---


SQUARES_NOTE = "a sum of squares without storing the squares"

_ALGEBRA = (
    RewriteRule("exp2", "torch.exp(_x)", "torch.exp2(_x * 1.4426950408889634)", "exp as a power of two"),
    # Reductions that need not store what they reduce.
    RewriteRule(
        "sum-squares",
        "_x.square().mean(-1, keepdim=True)",
        "torch.linalg.vecdot(_x, _x)[..., None] / _x.shape[-1]",
        SQUARES_NOTE,
    ),
    RewriteRule(
        "sum-squares",
        "_x.square().mean(_d, keepdim=True)",
        "torch.linalg.vector_norm(_x, dim=_d, keepdim=True).square() / _x.shape[_d]",
        SQUARES_NOTE,
    ),
    RewriteRule("sum-squares", "_x.square().sum(-1)", "torch.linalg.vecdot(_x, _x)", SQUARES_NOTE),
    RewriteRule(
        "sum-squares",
        "_x.square().sum(-1, keepdim=True)",
        "torch.linalg.vecdot(_x, _x)[..., None]",
        SQUARES_NOTE,
    ),
    RewriteRule("narrow", "_x.float()", "_x", "no conversion to single precision", all_places_only=True),
    RewriteRule(
        "narrow", "_x.to(torch.float32)", "_x", "no conversion to single precision", all_places_only=True
    ),
)


# --- compositions of primitives that torch has as one operation ---


_F = "torch.nn.functional"
_RMS_PATTERN = "torch.rsqrt(_x.square().mean(-1, keepdim=True) + _k)"
_CENTRED_PATTERN = "(_x - _x.mean(-1, keepdim=True))"
_NOTES = {
    "softmax": "one operation for a softmax",
    "norm": "one operation for a normalisation",
    "activation": "one operation for an activation",
    "product": "one operation for a product and what surrounds it",
    "search": "one operation for a search",
    "lookup": "one operation for a lookup",
}


def _fusion_rules(name: str, instead: str, *patterns: str) -> list[RewriteRule]:
    return [RewriteRule(f"fused-{name}", pattern, instead, _NOTES[name]) for pattern in patterns]


def _softmax_pattern(e: str) -> str:
    return f"{e} / {e}.sum(_d, keepdim=True)"


def _layer_norm_patterns(template: str) -> list[str]:
    """Ways to write a layer norm, each in place of {} in the `template`."""
    variances = [
        "_x.var(-1, unbiased=False, keepdim=True)",
        "_x.var(-1, keepdim=True, correction=0)",
        f"{_CENTRED_PATTERN}.square().mean(-1, keepdim=True)",
    ]
    patterns = []
    for variance in variances:
        patterns.append(template.format(f"({_CENTRED_PATTERN} * torch.rsqrt({variance} + _k))"))
        patterns.append(template.format(f"({_CENTRED_PATTERN} / torch.sqrt({variance} + _k))"))
    return patterns


_SCORE_PATTERNS = ("_q @ _m.transpose(-2, -1)", "_q @ _m.transpose(-1, -2)", "_q @ _m.mT")

_FUSIONS = (
    *_fusion_rules(
        "softmax",
        "torch.softmax(_x, _d)",
        _softmax_pattern("torch.exp(_x - _x.amax(_d, keepdim=True))"),
        _softmax_pattern("torch.exp(_x - _x.max(_d, keepdim=True).values)"),
        _softmax_pattern("torch.exp(_x - _x.max(_d, keepdim=True)[0])"),
        _softmax_pattern("torch.exp(_x)"),
    ),
    *_fusion_rules(
        "softmax",
        "torch.log_softmax(_x, _d)",
        "_x - _x.logsumexp(_d, keepdim=True)",
        "torch.log(torch.softmax(_x, _d))",
        "_x - torch.log(torch.exp(_x).sum(_d, keepdim=True))",
    ),
    *_fusion_rules("softmax", "torch.logsumexp(_x, _d)", "torch.log(torch.exp(_x).sum(_d))"),
    *_fusion_rules(
        "norm",
        f"{_F}.rms_norm(_x, (_x.shape[-1],), _w, _k)",
        f"_x * {_RMS_PATTERN} * _w",
        f"_w * (_x * {_RMS_PATTERN})",
        "_x / torch.sqrt(_x.square().mean(-1, keepdim=True) + _k) * _w",
    ),
    *_fusion_rules(
        "norm",
        f"{_F}.rms_norm(_x, (_x.shape[-1],), None, _k)",
        f"_x * {_RMS_PATTERN}",
        "_x / torch.sqrt(_x.square().mean(-1, keepdim=True) + _k)",
    ),
    *_fusion_rules(
        "norm", f"{_F}.layer_norm(_x, (_x.shape[-1],), _w, _b, _k)", *_layer_norm_patterns("{} * _w + _b")
    ),
    *_fusion_rules(
        "norm", f"{_F}.layer_norm(_x, (_x.shape[-1],), None, None, _k)", *_layer_norm_patterns("{}")
    ),
    *_fusion_rules("activation", f"{_F}.silu(_x)", "_x * torch.sigmoid(_x)", "_x / (1 + torch.exp(-_x))"),
    *_fusion_rules(
        "activation", "torch.sigmoid(_x)", "1 / (1 + torch.exp(-_x))", "torch.reciprocal(1 + torch.exp(-_x))"
    ),
    *_fusion_rules(
        "activation", "torch.relu(_x)", "_x.clamp(min=0)", "torch.maximum(_x, torch.zeros_like(_x))"
    ),
    *_fusion_rules("activation", f"{_F}.gelu(_x)", "_x * 0.5 * (1 + torch.erf(_x / 1.4142135623730951))"),
    *_fusion_rules(
        "activation", f"{_F}.softplus(_x)", "torch.log(1 + torch.exp(_x))", "torch.log1p(torch.exp(_x))"
    ),
    *_fusion_rules("product", f"{_F}.linear(_x, _w, _b)", "_x @ _w.T + _b", "_x @ _w.t() + _b"),
    *_fusion_rules("product", f"{_F}.linear(_x, _w)", "_x @ _w.T", "_x @ _w.t()"),
    *_fusion_rules(
        "product",
        f"{_F}.scaled_dot_product_attention(_q, _m, _v, scale=_s)",
        *(f"torch.softmax(({s}) * _s, -1) @ _v" for s in _SCORE_PATTERNS),
    ),
    *_fusion_rules(
        "product",
        f"{_F}.scaled_dot_product_attention(_q, _m, _v, scale=1.0 / _s)",
        *(f"torch.softmax(({s}) / _s, -1) @ _v" for s in _SCORE_PATTERNS),
    ),
    *_fusion_rules("product", "torch.addmm(_c, _a, _b)", "_c + _a @ _b"),
    *_fusion_rules("product", "torch.baddbmm(_c, _a, _b)", "_c + _a @ _b"),
    *_fusion_rules("product", "torch.addmm(_c, _a, _b, alpha=-1)", "_c - _a @ _b"),
    *_fusion_rules("product", "torch.baddbmm(_c, _a, _b, alpha=-1)", "_c - _a @ _b"),
    *_fusion_rules(
        "search",
        "_x.argmax(-1)",
        "torch.where(_x == _x.amax(-1, keepdim=True), _p, _n).amin(-1)",
        "torch.where(_x == _x.max(-1, keepdim=True).values, _p, _n).amin(-1)",
        "_x.max(-1).indices",
        "_x.max(-1)[1]",
    ),
    *_fusion_rules("search", "_x.max(-1).indices", "_x.argmax(-1)"),
    *_fusion_rules(
        "search",
        "_x.max(-1).indices",
        "torch.where(_x == _x.amax(-1, keepdim=True), _p, _n).amin(-1)",
    ),
    *_fusion_rules(
        "search",
        "(_x == _x.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1)",
        "torch.where(_x == _x.amax(-1, keepdim=True), _p, _n).amin(-1)",
    ),
    *_fusion_rules("lookup", f"{_F}.embedding_bag(_i, _t, mode='sum')", "_t[_i].sum(1)", "_t[_i].sum(-2)"),
    *_fusion_rules("lookup", f"{_F}.embedding_bag(_i, _t, mode='mean')", "_t[_i].mean(1)"),
    *_fusion_rules("lookup", f"{_F}.embedding(_i, _t).sum(1)", "_t[_i].sum(1)"),
    *_fusion_rules(
        "lookup", "_t.index_select(0, _i.reshape(-1)).reshape(*_i.shape, -1).sum(1)", "_t[_i].sum(1)"
    ),
)

RULES = (*_FUSIONS, *_ALGEBRA)
