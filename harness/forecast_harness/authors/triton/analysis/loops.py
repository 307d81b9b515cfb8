"""The loops of a function, and what may be changed about them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forecast_autotune import python_parser
from forecast_harness.authors.triton.analysis.function_facts import FunctionFacts, argument
from forecast_harness.authors.triton.analysis.source_unit import (
    Block,
    Function,
    SourceUnit,
    assigned_names,
    blocks,
    nodes_in_order,
    read_names,
)

_EXIT_STATEMENTS = (ast.Break, ast.Continue, ast.Return)


@dataclass(frozen=True)
class RangeLoop:
    """A `for` over `range` or `tl.range` with one counter."""

    unit: SourceUnit
    function: Function
    node: ast.For
    block: Block
    """The list of statements that holds the loop."""
    outer: bool
    """Whether the loop stands inside another loop."""

    @property
    def range_call(self) -> ast.Call:
        """The call of `range`."""
        assert isinstance(self.node.iter, ast.Call)
        return self.node.iter

    @property
    def counter(self) -> str:
        """Name of the counter."""
        assert isinstance(self.node.target, ast.Name)
        return self.node.target.id

    @property
    def range_bounds(self) -> tuple[str, str, str]:
        """First value, end and step as texts."""
        given = [ast.unparse(a) for a in self.range_call.args]
        named = {k.arg: ast.unparse(k.value) for k in self.range_call.keywords}
        if len(given) == 1:
            return "0", given[0], named.get("step", "1")
        return given[0], given[1], given[2] if len(given) > 2 else named.get("step", "1")

    @property
    def options(self) -> dict[str, ast.expr]:
        """Keywords of `tl.range`, without the extent."""
        return {
            k.arg: k.value
            for k in self.range_call.keywords
            if k.arg and k.arg not in ("arg1", "arg2", "step")
        }

    @property
    def innermost(self) -> bool:
        """Whether no other loop runs inside it, helpers included."""
        return not any(_has_loops(self.unit, s, frozenset()) for s in self.node.body)

    @property
    def may_exit_early(self) -> bool:
        """Whether control can leave an iteration or the loop early."""
        return bool(self.node.orelse) or any(isinstance(n, _EXIT_STATEMENTS) for n in ast.walk(self.node))

    @property
    def has_dots(self) -> bool:
        """Whether an iteration multiplies matrices, helpers included."""
        return _has_dots(self.unit, self.node.body, frozenset())

    @property
    def carried_names(self) -> set[str]:
        """Names whose value goes from one iteration into the next."""
        seen: set[str] = {self.counter}
        names: set[str] = set()
        assigned = set(assigned_names(self.node.body))
        for statement in self.node.body:
            names |= (read_names(statement) & assigned) - seen
            if not isinstance(statement, ast.If | ast.While | ast.For):
                seen |= set(assigned_names(statement))
            elif isinstance(statement, ast.If):
                seen |= set(assigned_names(statement.body)) & set(assigned_names(statement.orelse))
        return names

    @property
    def ascending(self) -> bool:
        """Whether the step is certainly positive: a tile is never empty."""
        step = self.range_bounds[2]
        parsed = python_parser.parse_expression(step)
        factors = [n for n in ast.walk(parsed) if not isinstance(n, ast.Name | ast.Constant | ast.Load)]
        constant = self.unit.constexprs(self.function)
        return all(isinstance(n, ast.Expression | ast.BinOp | ast.Mult) for n in factors) and all(
            (n.id in constant if isinstance(n, ast.Name) else isinstance(n.value, int) and n.value > 0)
            for n in ast.walk(parsed)
            if isinstance(n, ast.Name | ast.Constant)
        )

    def used_after(self, names: set[str]) -> bool:
        """Whether the function reads one of these names outside of this loop."""
        inside = {id(n) for n in ast.walk(self.node)}
        return any(
            isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id in names and id(n) not in inside
            for n in ast.walk(self.function)
        )


def loops(unit: SourceUnit, function: Function) -> Iterator[RangeLoop]:
    """Every `range` loop of a function, outer ones first."""
    inner = {
        id(n)
        for loop in ast.walk(function)
        if isinstance(loop, ast.For | ast.While)
        for s in loop.body
        for n in ast.walk(s)
    }
    for block in blocks(function):
        for statement in block:
            if (
                isinstance(statement, ast.For)
                and isinstance(statement.target, ast.Name)
                and unit.callee_name(statement.iter) == "range"
                and isinstance(statement.iter, ast.Call)
                and 1 <= len(statement.iter.args) <= 3
                and not any(isinstance(a, ast.Starred) for a in statement.iter.args)
                and not any(k.arg in (None, "arg1", "arg2") for k in statement.iter.keywords)
            ):
                yield RangeLoop(unit, function, statement, block, id(statement) in inner)


def _has_loops(unit: SourceUnit, node: ast.AST, seen: frozenset[str]) -> bool:
    for n in ast.walk(node):
        if isinstance(n, ast.For | ast.While) and unit.callee_name(getattr(n, "iter", n)) != "static_range":
            return True
    names = {c.func.id for c in unit.helper_calls(node) if isinstance(c.func, ast.Name)} - seen
    return any(_has_loops(unit, unit.functions[n], seen | names) for n in names)


def _has_dots(unit: SourceUnit, body: Block, seen: frozenset[str]) -> bool:
    if unit.calls(body, "dot", "dot_scaled"):
        return True
    names = {c.func.id for s in body for c in unit.helper_calls(s) if isinstance(c.func, ast.Name)} - seen
    return any(_has_dots(unit, unit.functions[n].body, seen | names) for n in names)


@dataclass(frozen=True)
class MemoryAccess:
    """A load, store or atomic through an address, not through a descriptor."""

    call: ast.Call
    kind: str
    """`load`, `store` or `atomic`."""
    pointer: ast.expr
    mask: ast.expr | None

    @property
    def plain(self) -> bool:
        """A load or store whose mask, if any, is a mask (block pointers are checked by dimensions)."""
        given = {k.arg for k in self.call.keywords}
        return self.kind in ("load", "store") and not given & {
            "boundary_check",
            "padding_option",
            "volatile",
            None,
        }


def keep_conditions(call: ast.Call, kind: str, rest: Sequence[ast.expr]) -> None:
    """Leave of a load's or store's mask only these conditions, in place; what it gives elsewhere goes too."""
    position = 1 if kind == "load" else 2
    left: ast.expr | None = None
    for test in rest:
        left = test if left is None else ast.BinOp(left, ast.BitAnd(), test)
    call.keywords = [k for k in call.keywords if k.arg != "mask" and (k.arg != "other" or left is not None)]
    other = call.args[position + 1 :]
    call.args = call.args[:position]
    if left is not None:
        call.keywords.append(ast.keyword("mask", left))
        call.keywords += [ast.keyword("other", o) for o in other]


def accesses(unit: SourceUnit, node: ast.AST | Block) -> list[MemoryAccess]:
    """Memory accesses of a tree in the order of the text; those of helpers are not among them."""
    results = []
    for root in node if isinstance(node, list) else [node]:
        for n in nodes_in_order(root):
            name = unit.callee_name(n)
            if not isinstance(n, ast.Call) or not n.args:
                continue
            if name == "load":
                results.append(MemoryAccess(n, "load", n.args[0], argument(n, 1, "mask")))
            elif name == "store":
                results.append(MemoryAccess(n, "store", n.args[0], argument(n, 2, "mask")))
            elif name.startswith("atomic_"):
                at = 3 if name == "atomic_cas" else 2
                results.append(MemoryAccess(n, "atomic", n.args[0], argument(n, at, "mask")))
    return results


def always_executes(statement: ast.AST, call: ast.Call) -> bool:
    """Whether a statement that is executed always makes this call: it is in no branch of an expression."""
    maybe = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.GeneratorExp)
    branches = [n for n in ast.walk(statement) if isinstance(n, maybe)]
    return not any(inner is call for branch in branches for inner in ast.walk(branch))


def all_accesses_known(unit: SourceUnit, node: ast.AST | Block) -> bool:
    """Whether every memory access of a tree is one that `accesses` finds."""
    roots = node if isinstance(node, list) else [node]
    listed = {id(a.call) for a in accesses(unit, node)}
    for n in (n for root in roots for n in ast.walk(root)):
        if isinstance(n, ast.Call) and id(n) not in listed and unit.effect(n) & {"load", "store", "atomic"}:
            return False
    return True


def loads_may_move(facts: FunctionFacts, body: Block) -> bool:
    """Whether no memory that the statements write is read by them: loads may move over the stores.

    Arguments of different names are taken not to overlap: no variant is launched where a tensor that is
    written overlaps another one (`forecast_integrations.triton.variants.loading`).
    """
    if not all_accesses_known(facts.unit, body):
        return not facts.unit.effects(body) & {"store", "atomic", "other"}
    if "other" in facts.unit.effects(body):
        return False
    read_roots, written = set[str](), set[str]()
    for access in accesses(facts.unit, body):
        roots = facts.root_parameters(access.pointer)
        if access.kind != "load" and roots is None:
            return False
        if access.kind == "load":
            read_roots |= roots or {"?"}
        else:
            written |= roots or set()
    return not written or ("?" not in read_roots and not read_roots & written)
