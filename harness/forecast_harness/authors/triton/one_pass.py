"""Kernels that go over the same data more than once: where one tile holds a row, keep it in registers."""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace as with_
from itertools import count

from forecast_autotune.python_parser import parse_expression
from forecast_autotune.records import Config
from forecast_harness.authors.triton.analysis.function_facts import (
    FunctionFacts,
    MemoryAccess,
    RangeLoop,
    accesses,
    all_accesses_known,
    always_executes,
    loops,
)
from forecast_harness.authors.triton.analysis.source_unit import (
    Block,
    SourceUnit,
    assigned_names,
    fresh_name,
    names,
    swap_expressions,
    with_own_names,
)
from forecast_harness.authors.triton.protocol import RewriteContext, SourceEdit

_WARPS = (4, 8, 16, 32)
_MAX_TILE = 65536


def _row_loops(unit: SourceUnit) -> Iterator[list[RangeLoop]]:
    """Loops of the entry that stand side by side and run over the same `range(0, n, TILE)`."""
    groups: dict[tuple[int, tuple[str, str, str]], list[RangeLoop]] = {}
    constant = unit.constexprs(unit.entry)
    variables = set(assigned_names(unit.entry))
    for loop in loops(unit, unit.entry):
        first, end, step = loop.range_bounds
        fits = first == "0" and step in constant and end.isidentifier() and end not in variables | constant
        if fits and loop.innermost and not loop.may_exit_early:
            groups.setdefault((id(loop.block), loop.range_bounds), []).append(loop)
    yield from (group for group in groups.values() if len(group) > 1)


# --- one tile holds the whole row ---


def one_pass(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """Where one tile holds a whole row, keep it in registers instead of loading it in every loop.

    The kernel asks for `n <= TILE` itself and keeps its loops for all other rows.
    """
    for same_row in _row_loops(unit):
        first, (_, end, step) = same_row[0], same_row[0].range_bounds
        at = next(i for i, s in enumerate(first.block) if s is first.node)
        rest = first.block[at:]
        if any(isinstance(n, ast.Return | ast.Break | ast.Continue) for s in rest for n in ast.walk(s)):
            continue
        straight: Block = []
        once = {id(loop.node): loop for loop in same_row}
        for statement in rest:
            loop = once.get(id(statement))
            if loop is None:
                straight.append(copy.deepcopy(statement))
            else:
                straight.append(ast.Assign([ast.Name(loop.counter, ast.Store())], ast.Constant(0)))
                straight += copy.deepcopy(loop.node.body)
        load_count = reuse_loads(unit, straight, names(unit.entry), (end, step))
        if not load_count:
            continue
        draft = unit.copy()
        block = draft.twin(first.block)
        test = parse_expression(f"({end} <= {step}) & ({end} > 0)")
        branches = straight, block[at:]
        if first.block is unit.entry.body:  # each branch may give these names another shape
            plain = [t for s in rest if isinstance(s, ast.Assign) for t in s.targets]
            common, every = set(assigned_names(plain)) & set(assigned_names(block[:at])), names(unit.entry)
            branches = with_own_names(straight, common, every), with_own_names(block[at:], common, every)
        block[at:] = [ast.If(test, *branches)]
        note = f"rows of up to {step} elements stay in registers: {load_count} loads fewer"
        configs = _wider_configs(context, step, context.value(end))
        yield SourceEdit(draft, note, 9.0, configs)


def reuse_loads(unit: SourceUnit, block: Block, existing: set[str], row: tuple[str, str]) -> int:
    """Reuse values that straight-line code has loaded before; returns how many loads are gone.

    `row` is the length of a row and the side of the tile that holds it. A store ends the reuse of
    loads through the same argument.
    """
    facts = FunctionFacts(unit, unit.entry)
    numbers = _ValueNumbering(unit, facts, row)
    count, at = 0, 0
    while at < len(block):
        statement = block[at]
        simple = isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr | ast.AnnAssign)
        # The innermost first: an address may itself be loaded.
        for access in reversed(accesses(unit, statement)) if simple else []:
            if access.kind != "load" or not access.plain or not always_executes(statement, access.call):
                continue
            name = numbers.name_of(access)
            if name is not None:
                swap_expressions(statement, {id(access.call): ast.Name(name, ast.Load())})
                count += 1
            else:
                name = fresh_name("kept", existing)
                numbers.remember(access, name)
                swap_expressions(statement, {id(access.call): ast.Name(name, ast.Load())})
                block.insert(at, ast.Assign([ast.Name(name, ast.Store())], access.call))
                at += 1
        numbers.assign(statement, simple)
        if unit.effects(statement) - {"load"}:
            writes = [facts.root_parameters(a.pointer) for a in accesses(unit, statement) if a.kind != "load"]
            clear = all_accesses_known(unit, statement) and "other" not in unit.effects(statement)
            numbers.forget([roots if clear else None for roots in writes] if writes else [None])
        at += 1
    return count


class _ValueNumbering:
    """Value numbering: equal numbers mean equal values."""

    def __init__(self, unit: SourceUnit, facts: FunctionFacts, row: tuple[str, str]) -> None:
        self._unit, self._facts, self._row = unit, facts, row
        self._names: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._next = count()
        self._constants: dict[int, int] = {}
        """Values of the numbers that are integer constants."""
        self._loads: dict[str, list[tuple[int | None, str, frozenset[str] | None]]] = {}

    def number(self, node: ast.AST | None) -> int:
        """The number of an expression."""
        if isinstance(node, ast.Name):
            if node.id not in self._names:
                self._names[node.id] = next(self._next)
            return self._names[node.id]
        if isinstance(node, ast.Call) and self._unit.effects(node):
            return next(self._next)
        if node is None:
            return -1
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return self._constant(node.value)
        if isinstance(node, ast.Call) and ast.unparse(node).endswith(f"cdiv({', '.join(self._row)})"):
            return self._constant(1)  # one tile holds the row
        if isinstance(node, ast.IfExp) and self.number(node.body) == self.number(node.orelse):
            return self.number(node.body)
        if isinstance(node, ast.BinOp) and (number := self._fold(node)) is not None:
            return number
        parts = [type(node).__name__]
        for _, value in ast.iter_fields(node):
            if isinstance(value, ast.AST):
                parts.append(str(self.number(value)))
            elif isinstance(value, list):
                parts += [str(self.number(v)) if isinstance(v, ast.AST) else repr(v) for v in value]
            else:
                parts.append(repr(value))
        return self._numbers.setdefault(" ".join(parts), next(self._next))

    def _constant(self, value: int) -> int:
        number = self._numbers.setdefault(f"int {value}", next(self._next))
        self._constants[number] = value
        return number

    def _fold(self, node: ast.BinOp) -> int | None:
        """The value after adding zero, multiplying by one, and arithmetic on constants."""
        left, right = self.number(node.left), self.number(node.right)
        a, b = self._constants.get(left), self._constants.get(right)
        if isinstance(node.op, ast.Mult):
            if 0 in (a, b):
                return self._constant(0)
            neutral = 1
        elif isinstance(node.op, ast.Add | ast.Sub):
            neutral = 0
        else:
            return None
        if a is not None and b is not None:
            sign = -1 if isinstance(node.op, ast.Sub) else 1
            return self._constant(a * b if neutral else a + sign * b)
        if b == neutral:
            return left
        return right if a == neutral and not isinstance(node.op, ast.Sub) else None

    def assign(self, statement: ast.stmt, simple: bool) -> None:
        """Take note of a statement's assignments."""
        if simple and isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            value = self.number(statement.value)
            for name in assigned_names(statement):
                self._names[name] = value
            return
        for name in assigned_names(statement):
            self._names[name] = next(self._next)

    def _key(self, access: MemoryAccess) -> tuple[str, int | None]:
        fill = next((k.value for k in access.call.keywords if k.arg == "other"), None)
        if len(access.call.args) > 2:
            fill = access.call.args[2]
        key = f"{self.number(access.pointer)} {self.number(access.mask)}"
        return key, None if fill is None else self.number(fill)

    def name_of(self, access: MemoryAccess) -> str | None:
        """The name that holds what a load would give; elements it masks out may be anything."""
        key, own_fill = self._key(access)
        loads = self._loads.get(key, [])
        return next((name for fill, name, _ in loads if own_fill in (None, fill)), None)

    def remember(self, access: MemoryAccess, name: str) -> None:
        """A load's value is now held by a name."""
        key, fill = self._key(access)
        self._loads.setdefault(key, []).append((fill, name, self._facts.root_parameters(access.pointer)))

    def forget(self, writes: Sequence[frozenset[str] | None]) -> None:
        """Memory behind these arguments has changed; None: behind any of them."""
        for loads in self._loads.values():
            loads[:] = [x for x in loads if x[2] and all(roots and not roots & x[2] for roots in writes)]


def _wider_configs(context: RewriteContext, tile: str, size: int | None) -> tuple[Config, ...]:
    """The base's configs, and ones whose tile holds longer rows."""
    configs = [c for c in context.configs if isinstance(dict(c.kwargs).get(tile), int)]
    if not configs:
        return ()

    def side(config: Config) -> int:
        value = dict(config.kwargs)[tile]
        assert isinstance(value, int)
        return value

    widest = max(map(side, configs))
    rest = {tuple((k, v) for k, v in c.kwargs if k != tile): c for c in reversed(configs)}
    least = sorted(rest.values(), key=lambda c: _product(c, tile))[:2]
    widths = [w for w in (widest * 2**i for i in range(1, 8)) if w <= _MAX_TILE]
    if size is not None:
        widths = [w for w in widths if w >= size][:1] if size > widest else []
    wider = [
        with_(c, kwargs=tuple((k, w if k == tile else v) for k, v in c.kwargs), num_warps=warps)
        for c in least
        for w in widths
        for warps in _WARPS
        if 8 <= w * _product(c, tile) // (32 * warps) <= 128
    ]
    rest_configs = [c for c in configs if size is None or side(c) >= size]
    return tuple(dict.fromkeys([*rest_configs, *wider])) or context.configs


def _product(config: Config, without: str) -> int:
    return math.prod(v for n, v in config.kwargs if n != without and type(v) is int and v > 0)
