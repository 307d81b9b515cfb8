"""The language of advice: a module with helpers and `def cost(config, args, device, launch)`, read by syntax.

A cost function is a pure function of config, shapes and device that returns the time of one launch, in any
unit. Nothing of it is executed as Python: statements and expressions become closures over arrays, so all
candidates are costed at once, and a text that asks for anything else is refused when it is read.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forecast_autotune import python_parser
from forecast_autotune.llm.advice.expressions import (
    MAX_CALL_DEPTH,
    ROOTS,
    CostEvaluation,
    Expression,
    ExpressionReader,
    Frame,
    refuse,
)
from forecast_autotune.llm.advice.functions import Value, select, truth
from forecast_autotune.llm.advice.subject import AdviceError, AdviceSubject

ENTRY = "cost"
MAX_CHARACTERS = 16_000
MAX_NODES = 4_000
MAX_CONSTANTS = 12
MAX_TURNS = 64
"""Turns of one loop."""
_ABOUT = ("SUMMARY", "CONFIDENCE", "SPREAD")
Array = npt.NDArray[np.float64]
_Run = Callable[[Frame], Value]
"""A statement: None, or the value it returns."""


@dataclass(frozen=True)
class FittedConstant:
    """A number in a cost function that measurements may correct."""

    name: str
    value: float
    spread: float
    """The factor within which it is right two times of three."""


@dataclass(frozen=True)
class Costs:
    """Forecasts of a cost function for n candidates."""

    log2: Array
    """log2 of the cost, [n]; only differences mean something."""
    terms: Mapping[str, Array]
    """Values of labelled terms, [n] each."""
    identity: npt.NDArray[np.intp] | None
    """Number of the binary that each candidate compiles to, [n]; None where that was not said."""


@dataclass(frozen=True)
class CostFunction:
    """A cost function that was read and found to be within the language."""

    text: str
    constants: tuple[FittedConstant, ...]
    labels: tuple[str, ...]
    summary: str
    """The part that decides the time, in a sentence of the author."""
    confidence: float
    """In (0, 1]: how likely its order of the fast configs is right, as its author states it."""
    spread: float
    """Root mean square error of log2 time among fast configs that its author expects."""
    run: Callable[[CostEvaluation], Value]

    def evaluate(
        self,
        subject: AdviceSubject,
        shifts: Mapping[str, Value] | None = None,
        scales: Mapping[str, Value] | None = None,
    ) -> Costs:
        """The costs of a subject's candidates; `shifts` and `scales` correct constants and terms by name, log2.

        Raises `AdviceError` where it reads what is not there, or gives what is no positive finite number.
        """
        moves = shifts or {}
        constants = {c.name: c.value * np.exp2(moves.get(c.name, 0.0)) for c in self.constants}
        factors = {label: np.exp2(shift) for label, shift in (scales or {}).items()}
        run = CostEvaluation(subject, constants, factors)
        with np.errstate(all="ignore"):
            try:
                cost = self.run(run)
            except AdviceError:
                raise
            except (TypeError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
                raise AdviceError(f"the cost function failed: {error}") from error
            result = _spread_out(cost, subject.size)
            if not (np.isfinite(result) & (result > 0)).all():
                raise AdviceError("the cost of every candidate must be a positive finite number")
            terms = {label: _spread_out(v, subject.size) for label, v in run.terms.items() if _is_number(v)}
            return Costs(np.log2(result), terms, _identity(run.identity, subject.size))


def parse_cost_function(text: str) -> CostFunction:
    """Read a cost function. Raises `AdviceError` with the line for what the language does not have."""
    if len(text) > MAX_CHARACTERS:
        raise AdviceError(
            f"a cost function has at most {MAX_CHARACTERS:,} characters, this has {len(text):,}"
        )
    try:
        tree = python_parser.parse_module(text)
        nodes = sum(1 for _ in ast.walk(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise AdviceError(f"a cost function is Python syntax: {error}") from error
    if nodes > MAX_NODES:
        raise AdviceError(f"a cost function has at most {MAX_NODES:,} syntax nodes, this has {nodes:,}")
    try:
        return _ModuleReader().read(text, tree)
    except RecursionError as error:
        raise AdviceError("a cost function must not be nested so deeply") from error


def without_comments(text: str) -> str:
    """A cost function without comments and docstrings. Raises `AdviceError` for a text that is none."""
    tree = ast.parse(parse_cost_function(text).text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef):
            body = [
                n for n in node.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
            ]
            node.body = body or [ast.Pass()]
    return ast.unparse(tree) + "\n"


class _ModuleReader:
    def __init__(self) -> None:
        self.expressions = ExpressionReader()
        self.about: dict[str, object] = {}

    def read(self, text: str, tree: ast.Module) -> CostFunction:
        entry: Callable[[CostEvaluation], Value] | None = None
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                if node.name == ENTRY:
                    entry = self._entry(node)
                else:
                    self._helper(node)
            elif isinstance(node, ast.Assign):
                self._assign_about(node)
            elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                raise refuse(node, "a module holds helpers, `cost`, and SUMMARY, CONFIDENCE and SPREAD")
        if entry is None:
            raise AdviceError(f"there is no `def {ENTRY}({', '.join(ROOTS)})`")
        constants = self.expressions.constants
        if len(constants) > MAX_CONSTANTS:
            raise AdviceError(f"at most {MAX_CONSTANTS} constants can be fitted, there are {len(constants)}")
        return CostFunction(
            text,
            tuple(FittedConstant(name, value, spread) for name, (value, spread) in constants.items()),
            tuple(self.expressions.labels),
            str(self.about.get("SUMMARY", ""))[:400],
            self._share("CONFIDENCE", 0.5, 1.0),
            self._share("SPREAD", 0.3, 4.0),
            entry,
        )

    def _share(self, name: str, default: float, most: float) -> float:
        value = self.about.get(name, default)
        if not isinstance(value, int | float) or not 0.0 < value <= most:
            raise AdviceError(f"{name} must be a number above 0 and at most {most:g}, not {value!r}")
        return float(value)

    def _assign_about(self, node: ast.Assign) -> None:
        target = node.targets[0]
        is_about = isinstance(target, ast.Name) and len(node.targets) == 1 and target.id in _ABOUT
        if not is_about or not isinstance(node.value, ast.Constant):
            raise refuse(node, f"only {', '.join(_ABOUT)} are assigned outside functions, each a plain value")
        assert isinstance(target, ast.Name)
        self.about[target.id] = node.value.value

    def _entry(self, node: ast.FunctionDef) -> Callable[[CostEvaluation], Value]:
        names = _parameters(node)
        if tuple(names) != ROOTS:
            raise refuse(node, f"{ENTRY} takes ({', '.join(ROOTS)})")
        body = self._block(node.body)

        def run(evaluation: CostEvaluation) -> Value:
            return _returned(body, Frame(evaluation, {}), node)

        return run

    def _helper(self, node: ast.FunctionDef) -> None:
        names = _parameters(node)
        body = self._block(node.body)

        def call(frame: Frame, values: list[Value]) -> Value:
            if len(values) != len(names):
                raise refuse(node, f"{node.name} takes {len(names)} arguments, not {len(values)}")
            run = frame.run
            run.depth += 1
            if run.depth > MAX_CALL_DEPTH:
                raise refuse(node, f"calls are nested more than {MAX_CALL_DEPTH} deep")
            result = _returned(body, Frame(run, dict(zip(names, values, strict=True))), node)
            run.depth -= 1
            return result

        self.expressions.helpers[node.name] = call

    def _block(self, nodes: Sequence[ast.stmt]) -> _Run:
        steps = [(_expressions_in(n), self._statement(n)) for n in nodes]

        def run(frame: Frame) -> Value:
            for expressions, step in steps:
                frame.run.step(expressions)
                if (value := step(frame)) is not None:
                    return value
            return None

        return run

    def _statement(self, node: ast.stmt) -> _Run:
        if isinstance(node, ast.Assign):
            return self._assign(node)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            return self._let(node.target.id, self.expressions.read(node.value, node.target.id))
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            target = ast.copy_location(ast.Name(node.target.id, ast.Load()), node)
            whole = ast.copy_location(ast.BinOp(target, node.op, node.value), node)
            return self._let(node.target.id, self.expressions.read(whole))
        if isinstance(node, ast.Return) and node.value is not None:
            return self.expressions.read(node.value)
        if isinstance(node, ast.If):
            return self._if(node)
        if isinstance(node, ast.For):
            return self._for(node)
        if isinstance(node, ast.Pass):
            return lambda frame: None
        if isinstance(node, ast.Expr):
            return self._plain(node)
        raise refuse(node, f"{type(node).__name__} is not allowed in a cost function")

    def _plain(self, node: ast.Expr) -> _Run:
        value = node.value
        if isinstance(value, ast.Constant):
            return lambda frame: None
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            if value.func.id == "same_binary" and not value.keywords:
                parts = [self.expressions.read(a) for a in value.args]

                def mark(frame: Frame) -> None:
                    frame.run.identity = tuple(part(frame) for part in parts)

                return mark
            if value.func.id == "term":
                inner = self.expressions.read(value)

                def keep(frame: Frame) -> None:
                    inner(frame)

                return keep
        raise refuse(node, "a value that nobody uses: assign it, or call term or same_binary")

    def _assign(self, node: ast.Assign) -> _Run:
        if len(node.targets) != 1:
            raise refuse(node, "one name is assigned at a time")
        target = node.targets[0]
        if isinstance(target, ast.Name):
            return self._let(target.id, self.expressions.read(node.value, target.id))
        values = node.value
        if isinstance(target, ast.Tuple) and isinstance(values, ast.Tuple):
            names = [t.id for t in target.elts if isinstance(t, ast.Name)]
            if len(names) == len(target.elts) == len(values.elts):
                parts = [self.expressions.read(v, n) for v, n in zip(values.elts, names, strict=True)]

                def assign(frame: Frame) -> None:
                    frame.names.update(zip(names, [p(frame) for p in parts], strict=True))

                return assign
        raise refuse(node, "only names are assigned, or as many names as values")

    def _let(self, name: str, value: Expression) -> _Run:
        if name in ROOTS:
            raise AdviceError(f"{name} cannot be assigned")

        def assign(frame: Frame) -> None:
            frame.names[name] = value(frame)

        return assign

    def _if(self, node: ast.If) -> _Run:
        test = self.expressions.read(node.test)
        then, otherwise = self._block(node.body), self._block(node.orelse)

        def run(frame: Frame) -> Value:
            holds = truth(test(frame))
            if holds.ndim == 0 or holds.all() or not holds.any():
                return (then if bool(holds.flat[0]) else otherwise)(frame)
            before = dict(frame.names)
            first = _for_some(then, holds, frame)
            one, frame.names = frame.names, before.copy()
            second = _for_some(otherwise, ~holds, frame)
            other = frame.names
            frame.names = _merged(holds, one, other)
            if first is not None and second is not None:
                return select(holds, first, second)
            if first is not None:
                frame.pending.append((holds, first))
            if second is not None:
                frame.pending.append((~holds, second))
            return None

        return run

    def _for(self, node: ast.For) -> _Run:
        call = node.iter
        is_range = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range"
        if not is_range or not isinstance(node.target, ast.Name) or node.orelse:
            raise refuse(node, "a loop is `for name in range(...)`")
        assert isinstance(call, ast.Call)
        parts, name, body = (
            [self.expressions.read(a) for a in call.args],
            node.target.id,
            self._block(node.body),
        )
        if not 1 <= len(parts) <= 3 or name in ROOTS:
            raise refuse(node, "a loop is `for name in range(...)`")

        def run(frame: Frame) -> Value:
            ends = [int(_uniform(p(frame), node)) for p in parts]
            turns = range(*ends) if len(ends) < 3 or ends[2] else range(0)
            if len(turns) > MAX_TURNS:
                raise refuse(node, f"a loop has at most {MAX_TURNS} turns, this has {len(turns)}")
            for turn in turns:
                frame.names[name] = float(turn)
                if (value := body(frame)) is not None:
                    return value
            return None

        return run


def _for_some(body: _Run, holds: npt.NDArray[np.bool_], frame: Frame) -> Value:
    """Run a branch that only the candidates for which `holds` take; early returns are theirs alone."""
    run, start, answer = frame.run, len(frame.pending), frame.run.identity
    value = body(frame)
    frame.pending[start:] = [(holds & early, v) for early, v in frame.pending[start:]]
    if run.identity is not answer:
        size = run.subject.size
        theirs, ours = _identity(run.identity, size), _identity(answer, size)
        assert theirs is not None
        default = np.arange(size) if ours is None else ours
        run.identity = (np.where(holds, theirs, size + default),)
    return value


def _expressions_in(node: ast.stmt) -> int:
    """Expressions that a statement evaluates besides those of the statements in it."""
    head = node.test if isinstance(node, ast.If) else node.iter if isinstance(node, ast.For) else node
    return sum(isinstance(n, ast.expr) for n in ast.walk(head))


def _parameters(node: ast.FunctionDef) -> list[str]:
    a = node.args
    odd = a.vararg or a.kwarg or a.kwonlyargs or a.posonlyargs or a.defaults
    if odd or node.decorator_list:
        raise refuse(node, "a function takes plain parameters, without defaults and decorators")
    return [p.arg for p in a.args]


def _returned(body: _Run, frame: Frame, node: ast.FunctionDef) -> Value:
    value = body(frame)
    if value is None:
        raise refuse(node, f"{node.name} must return a value in every case")
    for holds, early in reversed(frame.pending):
        value = select(holds, early, value)
    return value


def _merged(
    holds: npt.NDArray[np.bool_], first: Mapping[str, Value], second: Mapping[str, Value]
) -> dict[str, Value]:
    results = dict(second)
    for name, value in first.items():
        if name not in second:
            results[name] = value
        elif value is not second[name]:
            results[name] = select(holds, value, second[name])
    return results


def _uniform(value: Value, node: ast.AST) -> float:
    numbers = np.unique(np.asarray(value, float))
    if len(numbers) != 1 or not np.isfinite(numbers[0]) or abs(numbers[0]) > 1e6:
        raise refuse(node, "the bounds of a loop must be the same number for all candidates")
    return float(numbers[0])


def _is_number(value: Value) -> bool:
    return not isinstance(value, str) and np.asarray(value).dtype != object


def _spread_out(value: Value, size: int) -> Array:
    if not _is_number(value):
        raise AdviceError("the cost is a text")
    result = np.asarray(value, float)
    if result.ndim > 1 or (result.ndim == 1 and len(result) != size):
        raise AdviceError("the cost must be one number per candidate")
    return np.broadcast_to(result, (size,)).astype(float)


def _identity(columns: Sequence[Value], size: int) -> npt.NDArray[np.intp] | None:
    if not columns:
        return None
    of = np.zeros(size, dtype=np.intp)
    for column in columns:
        codes = np.unique(np.broadcast_to(np.asarray(column), (size,)), return_inverse=True)[1]
        of = np.unique(of * (int(codes.max()) + 1) + codes, return_inverse=True)[1]
    return of
