"""Whether what a tile holds outside of the matrix can ever reach memory.

Kernels often let the rows beyond the end of a matrix repeat others (`offsets % M`), since what becomes of
them is not stored. Where that shows, those rows may hold anything, such as zeros.
"""

from __future__ import annotations

import ast

from forecast_harness.authors.triton.analysis.function_facts import FunctionFacts
from forecast_harness.authors.triton.analysis.loops import accesses
from forecast_harness.authors.triton.analysis.polynomials import NotProvable, mask_conditions
from forecast_harness.authors.triton.analysis.shapes import argument
from forecast_harness.authors.triton.analysis.tile_addresses import (
    TileReader,
    WrappedOffsets,
    spread_along,
    spread_positive_form,
)

_ELEMENTWISE = frozenset(
    (
        *("abs", "clamp", "cos", "erf", "exp", "exp2", "fma", "log", "log2", "maximum", "minimum", "rsqrt"),
        *("sigmoid", "sin", "sqrt", "where", "cast", "multiple_of", "max_contiguous"),
    )
)
_ROUNDS = 3
"""Passes over the text: what a loop carries taints what stands above it."""


def never_stored_outside(
    facts: FunctionFacts, load: ast.Call, lane: str, wrapped: WrappedOffsets, reader: TileReader
) -> bool:
    """Whether elements of a load with `offsets >= size` along the lane's axis are never stored."""
    axis = int(lane.rpartition("@")[2])
    flow = _OutsideFlow(facts, load, axis)
    try:
        for _ in range(_ROUNDS):
            for statement in _statements(facts.function.body):
                flow.pass_through(statement)
        for store, tainted in flow.stores:
            for side in tainted:
                _require_masked(reader, store, side, wrapped)
    except NotProvable:
        return False
    return True


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    found = []
    for statement in body:
        found.append(statement)
        for name in ("body", "orelse"):
            found += _statements(getattr(statement, name, []))
    return found


class _OutsideFlow:
    """Axes along which values hold elements of the outside, by name."""

    def __init__(self, facts: FunctionFacts, load: ast.Call, axis: int) -> None:
        self._facts, self._load, self._axis = facts, load, axis
        self._tainted: dict[str, frozenset[int]] = {}
        self.stores: list[tuple[ast.Call, frozenset[int]]] = []
        """Stores of such values, with the axes along which they must be masked."""

    def pass_through(self, statement: ast.stmt) -> None:
        """Follow one statement, without those inside it. Raises `NotProvable` where the trace is lost."""
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            value = self.axes(statement.value)
            for target in targets:
                self._assign(target, value)
        elif isinstance(statement, ast.AugAssign):
            self._assign(statement.target, self.axes(statement.value))
        elif isinstance(statement, ast.Expr):
            self._expression(statement.value)
        else:
            for part in (getattr(statement, n, None) for n in ("test", "iter", "value")):
                if part is not None and self.axes(part):
                    raise NotProvable("control depends on it")

    def _assign(self, target: ast.expr, value: frozenset[int]) -> None:
        if isinstance(target, ast.Name):
            self._tainted[target.id] = self._tainted.get(target.id, frozenset()) | value
        elif value:
            raise NotProvable("it is assigned to parts of a tuple")

    def _expression(self, node: ast.expr) -> None:
        found = accesses(self._facts.unit, node)
        if len(found) == 1 and found[0].call is node and found[0].kind != "load":
            stored = argument(found[0].call, 1, "value") or argument(found[0].call, 1, "val")
            rest = [a for a in ast.iter_child_nodes(node) if a is not stored and isinstance(a, ast.expr)]
            rest += [k.value for k in found[0].call.keywords if k.value is not stored]
            if any(self.axes(part) for part in rest):
                raise NotProvable("an address or a mask depends on it")
            if stored is not None and (tainted := self.axes(stored)):
                self.stores.append((found[0].call, tainted))
        elif self.axes(node):
            raise NotProvable("it is used in another way")

    def axes(self, node: ast.expr) -> frozenset[int]:
        """Tainted axes of an expression. Raises `NotProvable` where they mix."""
        if node is self._load:
            return frozenset((self._axis,))
        if isinstance(node, ast.Name):
            return self._tainted.get(node.id, frozenset())
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Attribute) and node.attr == "T":
            return frozenset(1 - a for a in self.axes(node.value))
        parts = [self.axes(n) for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr)]
        found = frozenset[int]().union(*parts)
        if found and not isinstance(node, ast.BinOp | ast.UnaryOp | ast.Compare | ast.IfExp):
            raise NotProvable(f"{type(node).__name__} of it")
        return found

    def _call(self, node: ast.Call) -> frozenset[int]:
        unit = self._facts.unit
        name, method = unit.callee_name(node), unit.method_name(node)
        if method and isinstance(node.func, ast.Attribute):
            owner = self.axes(node.func.value)
            if owner and method != "to":
                raise NotProvable(f".{method} of it")
            return owner
        given = [self.axes(a) for a in [*node.args, *(k.value for k in node.keywords)]]
        found = frozenset[int]().union(*given)
        if not found:
            return found
        if name == "dot":
            left, right = given[0], given[1]
            into = argument(node, 2, "acc")
            if 1 in left or 0 in right:
                raise NotProvable("a dot sums over it")
            return (left & {0}) | (right & {1}) | (self.axes(into) if into is not None else frozenset())
        if name == "trans" and len(node.args) == 1:
            return frozenset(1 - a for a in found)
        if name in _ELEMENTWISE:
            return found
        raise NotProvable(f"{ast.unparse(node.func)} of it")


def _require_masked(reader: TileReader, store: ast.Call, axis: int, wrapped: WrappedOffsets) -> None:
    """Raise `NotProvable` unless a store keeps to `offsets < size` along an axis."""
    mask = argument(store, 2, "mask")
    named = {n: v[0] for n, v in reader.facts.definitions.items() if len(v) == 1 and v[0] is not None}
    after = TileReader(reader.facts, frozenset(), store.lineno)
    wanted = wrapped.size - spread_along(wrapped.offsets, axis)
    for test in mask_conditions(mask, named) if mask is not None else []:
        try:
            if spread_positive_form(after, test) == wanted:
                return
        except NotProvable:
            continue
    raise NotProvable("a store is not masked there")
