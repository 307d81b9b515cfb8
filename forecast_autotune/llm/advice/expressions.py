"""Expressions of a cost function: checked syntax trees as closures over arrays, never Python that runs.

Allowed syntax is listed here; any other raises `AdviceError` when the text is read, so an evaluation
meets nothing but numbers.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from forecast_autotune.llm.advice.functions import OF_DEVICE, PURE, Value, select, truth
from forecast_autotune.llm.advice.subject import AdviceError, AdviceSubject

ROOTS = ("config", "args", "device", "launch")
"""Names of a cost function's parameters, in this order."""
MAX_CALL_DEPTH = 8
_MODULES, _SYNONYMS = ("math", "np", "numpy"), {"maximum": "max", "minimum": "min", "trunc": "int"}
_MAX_STEPS = 400_000
"""Expressions of one evaluation at a few candidates; of thousands each counts several times."""
_CANDIDATES_PER_STEP = 1000.0
"""That cost as much as what is the same for one."""


@dataclass
class CostEvaluation:
    """One evaluation of a cost function."""

    subject: AdviceSubject
    constants: Mapping[str, Value]
    scales: Mapping[str, Value] = field(default_factory=dict)
    """Factors on terms by label."""
    terms: dict[str, Value] = field(default_factory=dict)
    """Values by label."""
    identity: tuple[Value, ...] = ()
    """Candidates with equal values here compile to the same binary; empty where that was not said."""
    steps: float = 0.0
    depth: int = 0

    def step(self, expressions: int) -> None:
        """Count a statement with so many expressions. Raises `AdviceError` beyond the limit."""
        self.steps += (1 + expressions) * (1.0 + self.subject.size / _CANDIDATES_PER_STEP)
        if self.steps > _MAX_STEPS:
            raise AdviceError(
                f"a cost function evaluates {_MAX_STEPS:,} expressions at most, and fewer of many candidates: use "
                "closed forms instead of loops"
            )


@dataclass
class Frame:
    """Names of one call, and what it has returned so far for some candidates."""

    run: CostEvaluation
    names: dict[str, Value]
    pending: list[tuple[Value, Value]] = field(default_factory=list)
    """(condition, value) of early returns, the first one first."""


Expression = Callable[[Frame], Value]


def _divide(a: Value, b: Value) -> Value:
    return np.true_divide(a, b)


_BINARY: dict[type[ast.operator], Callable[[Value, Value], Value]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: _divide,
    ast.FloorDiv: lambda a, b: np.floor(_divide(a, b)),
    ast.Mod: lambda a, b: a - b * np.floor(_divide(a, b)),
    ast.Pow: lambda a, b: np.power(np.asarray(a, float), b),
    ast.LShift: lambda a, b: a * np.exp2(b),
    ast.RShift: lambda a, b: np.floor(a / np.exp2(b)),
}
_COMPARE: dict[type[ast.cmpop], Callable[[Value, Value], Value]] = {
    ast.Lt: np.less,
    ast.LtE: np.less_equal,
    ast.Gt: np.greater,
    ast.GtE: np.greater_equal,
    ast.Eq: lambda a, b: np.asarray(a) == np.asarray(b),
    ast.NotEq: lambda a, b: np.asarray(a) != np.asarray(b),
}


def refuse(node: ast.AST, why: str) -> AdviceError:
    """The error for a node, with its line."""
    return AdviceError(f"line {getattr(node, 'lineno', '?')}: {why}")


class ExpressionReader:
    """Reads expressions of one module; `helpers` are its other functions by name, filled as they are read."""

    def __init__(self) -> None:
        self.helpers: dict[str, Callable[[Frame, list[Value]], Value]] = {}
        self.constants: dict[str, tuple[float, float]] = {}
        """Value and spread of each constant by name."""
        self.labels: list[str] = []

    def read(self, node: ast.expr, target: str = "") -> Expression:
        """The closure of an expression; `target` names a constant that is assigned."""
        if isinstance(node, ast.Constant):
            return self._constant(node)
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.Attribute | ast.Subscript):
            return self._path(node)
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            left, right = self.read(node.left), self.read(node.right)
            operate = _BINARY[type(node.op)]
            return lambda frame: operate(_number(left(frame), node), _number(right(frame), node))
        if isinstance(node, ast.UnaryOp):
            return self._unary(node)
        if isinstance(node, ast.BoolOp):
            return self._boolean(node)
        if isinstance(node, ast.Compare):
            return self._compare(node)
        if isinstance(node, ast.IfExp):
            test, then, otherwise = self.read(node.test), self.read(node.body), self.read(node.orelse)
            return lambda frame: _choose(test(frame), then, otherwise, frame)
        if isinstance(node, ast.Call):
            return self._call(node, target)
        raise refuse(node, f"{type(node).__name__} is not allowed in a cost function")

    def _constant(self, node: ast.Constant) -> Expression:
        value = node.value
        if isinstance(value, str):
            return lambda frame: value
        if isinstance(value, bool | int | float) and abs(value) < 1e30:
            number = float(value)
            return lambda frame: number
        if value is None:
            return lambda frame: 0.0
        raise refuse(node, "a constant is a number or a text")

    def _name(self, node: ast.Name) -> Expression:
        name = node.id

        def get(frame: Frame) -> Value:
            try:
                return frame.names[name]
            except KeyError:
                raise refuse(node, f"{name} has no value here") from None

        return get

    def _path(self, node: ast.Attribute | ast.Subscript) -> Expression:
        path: list[str | int] = []
        at: ast.expr = node
        while isinstance(at, ast.Attribute | ast.Subscript):
            if isinstance(at, ast.Attribute):
                path.append(at.attr)
            else:
                path.append(_index(at.slice))
            at = at.value
        if not isinstance(at, ast.Name) or at.id not in ROOTS:
            raise refuse(node, f"only {', '.join(ROOTS)} have attributes and elements")
        whole = (at.id, *reversed(path))

        def get(frame: Frame) -> Value:
            try:
                return frame.run.subject.lookup(whole)
            except AdviceError as error:
                raise refuse(node, str(error)) from None

        return get

    def _unary(self, node: ast.UnaryOp) -> Expression:
        inner = self.read(node.operand)
        if isinstance(node.op, ast.USub):
            return lambda frame: np.negative(_number(inner(frame), node))
        if isinstance(node.op, ast.UAdd):
            return inner
        if isinstance(node.op, ast.Not):
            return lambda frame: ~truth(inner(frame))
        raise refuse(node, "of the unary operators only -, + and not are allowed")

    def _boolean(self, node: ast.BoolOp) -> Expression:
        parts = [self.read(v) for v in node.values]
        join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or

        def fold(frame: Frame) -> Value:
            result: Value = truth(parts[0](frame))
            for part in parts[1:]:
                # A text that settles the matter may guard what the call does not have.
                if np.ndim(result) == 0 and bool(result) == isinstance(node.op, ast.Or):
                    return result
                result = join(result, truth(part(frame)))
            return result

        return fold

    def _compare(self, node: ast.Compare) -> Expression:
        first, sides = self.read(node.left), []
        for operator, side in zip(node.ops, node.comparators, strict=True):
            if isinstance(operator, ast.In | ast.NotIn):
                sides.append(self._member(operator, side))
                continue
            if type(operator) not in _COMPARE:
                raise refuse(node, f"the comparison {type(operator).__name__} is not allowed")
            sides.append(self._side(type(operator), side))

        def fold(frame: Frame) -> Value:
            left, result = first(frame), None
            for test in sides:
                holds, left = test(frame, left)
                result = holds if result is None else np.logical_and(result, holds)
            return result

        return fold

    def _side(
        self, operator: type[ast.cmpop], side: ast.expr
    ) -> Callable[[Frame, Value], tuple[Value, Value]]:
        right, compare = self.read(side), _COMPARE[operator]
        plain = operator in (ast.Eq, ast.NotEq)

        def test(frame: Frame, left: Value) -> tuple[Value, Value]:
            value = right(frame)
            if not plain:
                return compare(_number(left, side), _number(value, side)), value
            return compare(left, value), value

        return test

    def _member(
        self, operator: ast.In | ast.NotIn, side: ast.expr
    ) -> Callable[[Frame, Value], tuple[Value, Value]]:
        if not isinstance(side, ast.Tuple | ast.List | ast.Set):
            raise refuse(side, "`in` takes a list of numbers or texts")
        choices = [self.read(item) for item in side.elts]

        def test(frame: Frame, left: Value) -> tuple[Value, Value]:
            results: Value = np.zeros(np.shape(left), dtype=bool)
            for choice in choices:
                results = np.logical_or(results, np.asarray(left) == np.asarray(choice(frame)))
            return (results if isinstance(operator, ast.In) else ~results), left

        return test

    def _call(self, node: ast.Call, target: str) -> Expression:
        name = _function_name(node)
        if name == "constant":
            return self._fitted_constant(node, target)
        if name == "term":
            return self._term(node)
        if node.keywords or any(isinstance(a, ast.Starred) for a in node.args):
            raise refuse(node, f"{name} takes plain arguments only")
        parts = [self.read(a) for a in node.args]
        if name in OF_DEVICE:
            of_device = OF_DEVICE[name]
            return lambda frame: _applied(
                node, of_device, [frame.run.subject.device, *_numbers(parts, frame, node)]
            )
        if name in PURE:
            function = PURE[name]
            return lambda frame: _applied(node, function, _numbers(parts, frame, node))
        if name in self.helpers:
            helper = self.helpers[name]
            return lambda frame: helper(frame, [p(frame) for p in parts])
        names = ", ".join(sorted({*PURE, *OF_DEVICE, *self.helpers, "constant", "term"}))
        raise refuse(node, f"there is no function {name} (a helper stands above its use); there are {names}")

    def _fitted_constant(self, node: ast.Call, target: str) -> Expression:
        values: dict[str, object] = {}
        for name, part in zip(("value", "spread", "label"), node.args, strict=False):
            values[name] = _literal(part)
        for keyword in node.keywords:
            values[str(keyword.arg)] = _literal(keyword.value)
        value, spread = values.get("value"), values.get("spread", 1.5)
        name = str(values.get("label") or target or f"line {node.lineno}")
        fine = isinstance(value, int | float) and isinstance(spread, int | float)
        if not fine or not (0 < float(value) < 1e15 and 1.0 < float(spread) <= 16.0):  # type: ignore[arg-type]
            raise refuse(node, "constant(value, spread=1.5) takes a positive number and a factor in (1, 16]")
        base, number = name, 1
        while name in self.constants:
            number += 1
            name = f"{base} ({number})"
        self.constants[name] = (float(value), float(spread))  # type: ignore[arg-type]
        return lambda frame: frame.run.constants[name]

    def _term(self, node: ast.Call) -> Expression:
        if len(node.args) != 2 or node.keywords:
            raise refuse(node, 'term takes a value and a label: term(ms, "spills")')
        first, second = node.args
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            first, second = second, first
        label = _literal(second)
        if not isinstance(label, str):
            raise refuse(node, "a term's label is a text")
        inner, label = self.read(first), label[:80]
        self.labels.append(label)

        def keep(frame: Frame) -> Value:
            value = inner(frame)
            if (scale := frame.run.scales.get(label)) is not None:
                value = _number(value, node) * scale
            frame.run.terms[label] = value
            return value

        return keep


def _choose(test: Value, then: Expression, otherwise: Expression, frame: Frame) -> Value:
    holds = truth(test)
    if holds.ndim == 0 or holds.all() or not holds.any():
        return then(frame) if bool(holds.flat[0] if holds.ndim else holds) else otherwise(frame)
    return select(holds, then(frame), otherwise(frame))


def _applied(node: ast.Call, function: Callable[..., Value], values: list[Value]) -> Value:
    try:
        return function(*values)
    except (TypeError, ValueError) as error:
        raise refuse(node, f"{_function_name(node)}: {error}") from None


def _numbers(parts: list[Expression], frame: Frame, node: ast.AST) -> list[Value]:
    return [_number(part(frame), node) for part in parts]


def _number(value: Value, node: ast.AST) -> Value:
    if isinstance(value, str) or (isinstance(value, np.ndarray) and value.dtype == object):
        raise refuse(node, "texts can only be compared with == and !=")
    return np.asarray(value, float) if isinstance(value, np.ndarray) and value.dtype == bool else value


def _function_name(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Name):
        return function.id
    owner = function.value if isinstance(function, ast.Attribute) else None
    if isinstance(function, ast.Attribute) and isinstance(owner, ast.Name) and owner.id in _MODULES:
        return _SYNONYMS.get(function.attr, function.attr)
    raise refuse(node, "a function is called by its name")


def _index(node: ast.expr) -> str | int:
    value = _literal(node)
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise refuse(node, "an element is named by a whole number or a text")


def _literal(node: ast.expr) -> object:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand)
        if isinstance(value, int | float):
            return -value
    if isinstance(node, ast.Constant):
        if isinstance(node.value, float) and not math.isfinite(node.value):
            raise refuse(node, "numbers must be finite")
        return node.value
    raise refuse(node, "a plain number or text is needed here")
