"""Integer expressions as sums of products, to prove that a mask is true for a whole range of iterations.

The one claim made here: in iteration `i` of a loop, a comparison of offsets with a bound holds for every
element of the block as long as `i` stays below a limit, which is given as an expression.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field

from forecast_autotune.python_parser import parse_expression
from forecast_harness.authors.triton.analysis.function_facts import FunctionFacts, RangeLoop
from forecast_harness.authors.triton.analysis.source_unit import assigned_names, read_names

Monomial = tuple[str, ...]
"""Sorted texts of factors; the empty tuple is the number one."""


class NotProvable(Exception):
    """The text does not show what a rewrite needs; the rewrite does not apply."""


@dataclass
class Polynomial:
    """A polynomial with whole coefficients over texts ("atoms")."""

    terms: dict[Monomial, int] = field(default_factory=dict)

    @classmethod
    def of(cls, *factors: str, times: int = 1) -> Polynomial:
        """One product."""
        return cls({tuple(sorted(factors)): times} if times else {})

    def __add__(self, other: Polynomial) -> Polynomial:
        terms = dict(self.terms)
        for product, times in other.terms.items():
            terms[product] = terms.get(product, 0) + times
        return Polynomial({p: t for p, t in terms.items() if t})

    def __sub__(self, other: Polynomial) -> Polynomial:
        return self + Polynomial({p: -t for p, t in other.terms.items()})

    def __mul__(self, other: Polynomial) -> Polynomial:
        terms = Polynomial()
        for p, t in self.terms.items():
            for q, u in other.terms.items():
                terms += Polynomial.of(*p, *q, times=t * u)
        return terms

    def coefficient_of(self, atom: str) -> Polynomial:
        """The products that hold an atom once, without it."""
        coefficient = Polynomial()
        for product, times in self.terms.items():
            if product.count(atom) == 1:
                rest = list(product)
                rest.remove(atom)
                coefficient += Polynomial.of(*rest, times=times)
            elif atom in product:
                raise NotProvable(f"{atom} is multiplied by itself")
        return coefficient

    def without(self, atom: str) -> Polynomial:
        """The products that do not hold an atom."""
        return Polynomial({p: t for p, t in self.terms.items() if atom not in p})

    def atoms(self) -> set[str]:
        """Every atom."""
        return {a for product in self.terms for a in product}

    def text(self) -> str:
        """The sum as Python; positive products first, in a fixed order."""
        parts = []
        for product, times in sorted(self.terms.items(), key=lambda item: (item[1] < 0, item[0] == (), item)):
            factors = [f"({a})" if _needs_parentheses(a) else a for a in product]
            if abs(times) != 1 or not factors:
                factors.insert(0, str(abs(times)))
            parts.append(("-" if times < 0 else "+") + " " + " * ".join(factors))
        if not parts:
            return "0"
        return " ".join(parts).removeprefix("+ ")


def _needs_parentheses(text: str) -> bool:
    return not isinstance(parse_expression(text), ast.Name | ast.Call | ast.Constant | ast.Subscript)


@dataclass
class PolynomialReader:
    """Reads expressions as sums, inside one loop body (or outside of any, with an empty `local`)."""

    facts: FunctionFacts
    varying: frozenset[str]
    """Names that the loop assigns: an expression of them is an atom only within one iteration."""
    line: int
    """Line of the loop: assignments further down say nothing of the names used in it."""
    local: dict[str, Polynomial | None] = field(default_factory=dict)
    """Names that were assigned so far in this iteration; None: not an integer sum."""

    def polynomial(self, node: ast.expr) -> Polynomial:
        """Raises `NotProvable` for what is no sum of products of names that mean one thing."""
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, int)
            and not isinstance(node.value, bool)
        ):
            return Polynomial.of(times=node.value)
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return Polynomial() - self.polynomial(node.operand)
        if isinstance(node, ast.Subscript):  # only ever an added dimension, for an integer
            return self.polynomial(node.value)
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, ast.Add):
                return self.polynomial(node.left) + self.polynomial(node.right)
            if isinstance(node.op, ast.Sub):
                return self.polynomial(node.left) - self.polynomial(node.right)
            if isinstance(node.op, ast.Mult):
                return self.polynomial(node.left) * self.polynomial(node.right)
        if isinstance(node, ast.Call):
            return self._call(node)
        return self._atom(node)

    def _name(self, node: ast.Name) -> Polynomial:
        if node.id in self.local:
            name = self.local[node.id]
            if name is None:
                raise NotProvable(f"{node.id} is no sum")
            return name
        if node.id not in self.varying:
            value = self.facts.single_value(node.id)
            # Its definition must still mean the same: nothing in it is assigned twice, or by the loop.
            is_known = value is not None and getattr(value, "lineno", self.line) < self.line
            if value is not None and is_known and all(self._steady(n) for n in read_names(value)):
                try:
                    name = self.outside().polynomial(value)
                    if name != Polynomial.of(ast.unparse(value)) or isinstance(value, ast.Name):
                        return name  # else its definition shows nothing, and its name is shorter
                except NotProvable:
                    pass
        return self._atom(node)

    def outside(self) -> PolynomialReader:
        """A reader of what is assigned before the loop."""
        return PolynomialReader(self.facts, self.varying, self.line)

    def _steady(self, name: str) -> bool:
        values = self.facts.definitions.get(name, [])
        return name not in self.varying and len(values) <= (0 if name in self.facts.parameters else 1)

    def _call(self, node: ast.Call) -> Polynomial:
        unit = self.facts.unit
        name = unit.callee_name(node)
        if name == "arange" and len(node.args) == 2:
            first, last = node.args
            if isinstance(first, ast.Constant) and first.value == 0:
                return Polynomial.of(f"arange<{ast.unparse(last)}>")
        if name in ("multiple_of", "max_contiguous") and node.args:
            return self.polynomial(node.args[0])
        wide = [ast.unparse(a) for a in node.args] == [f"{unit.tl}.int64"]
        if wide and unit.method_name(node) == "to" and isinstance(node.func, ast.Attribute):
            return self.polynomial(node.func.value)
        return self._atom(node)

    def _atom(self, node: ast.expr) -> Polynomial:
        if read_names(node) & self.varying:
            raise NotProvable(f"{ast.unparse(node)} changes with the iteration")
        if self.facts.unit.effects(node):
            raise NotProvable(f"{ast.unparse(node)} reads memory")
        return Polynomial.of(ast.unparse(node))

    def assign(self, statement: ast.stmt) -> None:
        """Take note of the assignments of a statement of the body."""
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            if isinstance(target, ast.Name):
                try:
                    value: Polynomial | None = self.polynomial(statement.value)
                except NotProvable:
                    value = None
                self.local[target.id] = value
                return
        for name in assigned_names(statement):
            self.local[name] = None


@dataclass(frozen=True)
class CounterBound:
    """A condition on a loop's counter under which a comparison holds for every element."""

    factor: str
    """The counter is multiplied by this: `1`, or the block's side."""
    limit: str
    """The comparison holds while counter * factor + side <= limit."""
    side: str
    """Side of the block."""


def positive_form(reader: PolynomialReader, test: ast.expr) -> Polynomial:
    """The sum that is at least one where a comparison holds. Raises `NotProvable` for other tests."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        raise NotProvable(f"{ast.unparse(test)} is no simple comparison")
    left, right, op = reader.polynomial(test.left), reader.polynomial(test.comparators[0]), test.ops[0]
    if isinstance(op, ast.Lt | ast.LtE):
        slack = right - left
    elif isinstance(op, ast.Gt | ast.GtE):
        slack = left - right
    else:
        raise NotProvable(f"{ast.unparse(test)} is no bound")
    return slack + Polynomial.of(times=1) if isinstance(op, ast.LtE | ast.GtE) else slack


def induction_variables(reader: PolynomialReader, loop: RangeLoop) -> dict[str, Polynomial]:
    """Names that a loop moves by the same amount in every iteration, as sums of its counter.

    They hold from the beginning of an iteration to the statement that moves them.
    """
    first, _, step = loop.range_bounds
    variables: dict[str, Polynomial] = {}
    inside = {id(n) for s in loop.node.body for n in ast.walk(s)}
    for statement in loop.node.body:
        if not isinstance(statement, ast.AugAssign) or not isinstance(statement.op, ast.Add):
            continue
        name = getattr(statement.target, "id", "")
        values = reader.facts.definitions.get(name, [])
        begin = values[0] if len(values) == 2 else None
        if len(values) == 1 and name in reader.facts.parameters and not loop.outer:
            begin = ast.Name(name, ast.Load())
        if begin is None or id(begin) in inside or (loop.outer and not _assigned_before_loop(loop, begin)):
            continue
        try:
            start = (
                Polynomial.of(name) if name in reader.facts.parameters else reader.outside().polynomial(begin)
            )
            distance = Polynomial.of(loop.counter) - reader.outside().polynomial(parse_expression(first))
            rate = _divide_by_step(reader.outside().polynomial(statement.value), step)
        except NotProvable:
            continue
        variables[name] = start + rate * distance
    return variables


def _assigned_before_loop(loop: RangeLoop, value: ast.expr) -> bool:
    """Whether a value is assigned by a statement of the list that holds the loop, before it."""
    before = loop.block[: next(i for i, s in enumerate(loop.block) if s is loop.node)]
    return any(isinstance(s, ast.Assign) and s.value is value for s in before)


def _divide_by_step(amount: Polynomial, step: str) -> Polynomial:
    if step == "1":
        return amount
    node = parse_expression(step)
    factors = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        factors.append(ast.unparse(node.right))
        node = node.left
    for factor in (*factors, ast.unparse(node)):
        quotient = amount.coefficient_of(factor)
        if quotient * Polynomial.of(factor) != amount:
            raise NotProvable(f"{amount.text()} is no multiple of {step}")
        amount = quotient
    return amount


def counter_bound(reader: PolynomialReader, test: ast.expr, counter: str) -> CounterBound:
    """The bound of a comparison `offsets < limit`, in any arrangement of its parts.

    Raises `NotProvable` for comparisons of another form.
    """
    slack = positive_form(reader, test)
    lanes = [a for a in slack.atoms() if a.startswith("arange<")]
    if len(lanes) != 1 or slack.coefficient_of(lanes[0]) != Polynomial.of(times=-1):
        raise NotProvable(f"{ast.unparse(test)} does not compare one range of offsets")
    side = lanes[0].removeprefix("arange<").removesuffix(">")
    factor = Polynomial() - slack.coefficient_of(counter)
    limit = slack.without(lanes[0]).without(counter)
    sides = reader.outside().polynomial(parse_expression(side))
    if not factor.terms:
        raise NotProvable(f"{ast.unparse(test)} does not depend on {counter}")
    if factor == Polynomial.of(times=1):
        return CounterBound("1", limit.text(), side)
    if factor == sides:
        return CounterBound(side, limit.text(), side)
    raise NotProvable(f"{counter} moves by {factor.text()}, the block is {side} wide")


def mask_conditions(node: ast.expr, definitions: Mapping[str, ast.expr]) -> list[ast.expr]:
    """The conditions that a mask is the conjunction of; names of masks are followed."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        return [*mask_conditions(node.left, definitions), *mask_conditions(node.right, definitions)]
    if isinstance(node, ast.Name) and node.id in definitions:
        return mask_conditions(definitions[node.id], definitions)
    if isinstance(node, ast.Subscript):  # (offs < n)[:, None]
        inner = mask_conditions(node.value, definitions)
        if len(inner) == 1 and isinstance(inner[0], ast.Compare):
            return [ast.Subscript(inner[0], node.slice, ast.Load())]
    return [node]
