"""Several programs share a reduction; the last of them to finish adds their parts and stores the result.

Each leaves its part in the launch's own memory and counts itself as done. Parts are added in the order of the loop, by
whoever comes last: results are the same in every launch, of any type, and what follows the loop (a bias, an
activation, a division) is computed once. Nobody waits for anybody.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from forecast_autotune.python_parser import parse_expression
from forecast_autotune.variants.contract import COUNTERS, MEMORY, WORKSPACE
from forecast_harness.authors.triton.analysis.function_facts import (
    FunctionFacts,
    RangeLoop,
    all_accesses_known,
    argument,
    axis_of,
    loops,
)
from forecast_harness.authors.triton.analysis.polynomials import PolynomialReader, induction_variables
from forecast_harness.authors.triton.analysis.source_unit import (
    Block,
    SourceUnit,
    arguments,
    assigned_names,
    docstring_length,
    every_node,
    fresh_name,
    names,
    parse_statements,
    read_names,
)
from forecast_harness.authors.triton.protocol import RewriteContext, SourceEdit

MULTIPROCESSORS = 132
"""Multiprocessors of the device that the number of programs suits: they are a multiple of it."""


def exchangeable_program_ids(unit: SourceUnit) -> dict[int, list[ast.Call]] | None:
    """`program_id` calls of the entry by axis; None where programs may not exchange their numbers."""
    if any(isinstance(n, ast.While) for f in unit.kernels for n in ast.walk(f)):
        return None  # a lock, perhaps
    for function in unit.kernels:
        own = unit.calls(function, "program_id", "num_programs")
        waits = unit.calls(function, "atomic_cas", "atomic_xchg", "debug_barrier")
        if waits or (own and function is not unit.entry) or any(axis_of(c) < 0 for c in own):
            return None
        if unit.calls(function, "num_programs"):
            return None
    ids: dict[int, list[ast.Call]] = {}
    for call in unit.calls(unit.entry, "program_id"):
        ids.setdefault(axis_of(call), []).append(call)
    return ids


def moved_offsets(facts: FunctionFacts, loop: RangeLoop) -> frozenset[str]:
    """Names that a loop moves by the same amount in every iteration."""
    reader = PolynomialReader(facts, frozenset(assigned_names(loop.node)), loop.node.lineno)
    return frozenset(induction_variables(reader, loop))


def adding_statement(loop: RangeLoop, name: str) -> ast.stmt | None:
    """The one statement of an iteration that assigns a name and reads it; None where others do either."""
    adds = [s for s in loop.node.body if name in assigned_names(s)]
    reads = sum(name in read_names(s) for s in loop.node.body)
    return adds[0] if len(adds) == 1 and reads == 1 else None


def adds_in_place(unit: SourceUnit, statement: ast.stmt, name: str) -> bool:
    """Whether a statement adds to a name what does not depend on it, by `+=` or as a dot's accumulator."""
    if isinstance(statement, ast.AugAssign):
        return isinstance(statement.op, ast.Add) and name not in read_names(statement.value)
    value = statement.value if isinstance(statement, ast.Assign) else None
    if not isinstance(value, ast.Call) or unit.callee_name(value) != "dot":
        return False
    acc = argument(value, 2, "acc")
    rest = [a for a in (*value.args, *(k.value for k in value.keywords)) if a is not acc]
    return isinstance(acc, ast.Name) and acc.id == name and all(name not in read_names(a) for a in rest)


def run_from(node: ast.For, loop: RangeLoop, skipped: str, stop: str) -> None:
    """Have a loop's copy begin after so many iterations, and end at `stop`."""
    first, _, step = loop.range_bounds
    assert isinstance(node.iter, ast.Call)
    node.iter.args = list(map(parse_expression, (f"{first} + {skipped} * ({step})", stop, step)))
    node.iter.keywords = [k for k in node.iter.keywords if k.arg != "step"]


def move_to_part(loop: RangeLoop, offsets: Collection[str], skipped: str) -> list[str]:
    """Statements that move the loop's offsets by the iterations that a program skips."""
    return [
        f"{ast.unparse(statement.target)} += ({ast.unparse(statement.value)}) * {skipped}"
        for statement in loop.node.body
        if isinstance(statement, ast.AugAssign) and set(assigned_names(statement)) <= set(offsets)
    ]


_MOST_PARTS = {True: 16, False: 32}
"""Programs that share a tile at most, with dots and without: each part is written and read once more."""
_PROGRAMS = {True: (1, 2), False: (4, 16)}
"""Programs for each multiprocessor that a launch is filled up to, with dots and without."""
_MOST_STATEMENTS_AFTER = 60
"""Statements after the loop: one program of those that share a tile executes them."""


@dataclass(frozen=True)
class _Sum:
    """One block, or number, that the loop adds to, from zero."""

    name: str
    zero: str
    """The value it begins with."""
    sides: tuple[str, ...]

    @property
    def elements(self) -> str:
        return " * ".join(self.sides) or "1"

    def places(self, tl: str) -> str:
        """The offsets of its elements in a part."""
        if not self.sides:
            return "0"
        if len(self.sides) == 1:
            return f"{tl}.arange(0, {self.sides[0]})"
        rows, columns = self.sides
        return f"({tl}.arange(0, {rows})[:, None] * {columns} + {tl}.arange(0, {columns})[None, :])"


@dataclass(frozen=True)
class _SharedLoop:
    """The one loop of a kernel, and the sums that programs which share it hand over."""

    unit: SourceUnit
    facts: FunctionFacts
    loop: RangeLoop
    sums: tuple[_Sum, ...]
    offsets: frozenset[str]
    """Offsets that it moves by the same amount in every iteration."""
    axes: dict[int, list[ast.Call]]

    @property
    def elements(self) -> str:
        """The elements of one part."""
        return " + ".join(s.elements for s in self.sums)

    def part(self, number: str, which: int) -> str:
        """Addresses of one of the sums in the part with a number."""
        before = "".join(f" + {s.elements}" for s in self.sums[:which])
        return f"{WORKSPACE} + {number} * ({self.elements}){before} + {self.sums[which].places(self.unit.tl)}"

    def take_part(
        self,
        draft: SourceUnit,
        before: Sequence[str],
        after: Sequence[str],
        *,
        skipped: str,
        count: str,
        last: str,
    ) -> None:
        """Have a copy of the kernel run `count` iterations after the `skipped` ones, or until the loop ends.

        Lines `before` and `after` stand around the loop; the code after it is executed only where `last` is true.
        """
        node, block = draft.twin(self.loop.node), draft.twin(self.loop.block)
        first, end, step = self.loop.range_bounds
        run_from(node, self.loop, skipped, f"min({end}, {first} + ({skipped} + {count}) * ({step}))")
        at = next(i for i, s in enumerate(block) if s is node)
        block[at:] = [
            *parse_statements("\n".join([*before, *move_to_part(self.loop, self.offsets, skipped)])),
            node,
            *parse_statements("\n".join(after)),
            ast.If(ast.Name(last, ast.Load()), block[at + 1 :], []),
        ]

    def hand_over(self, *, tile: str, own: str, last: str, others: str, each: str, parts: str) -> list[str]:
        """Leave the part `own`, count as done, and where all `others` have, add all parts.

        `each` is the head of a loop over all of them, `parts` the number of a part in it; `last` is the name that then
        tells whether this program was the last one.
        """
        tl = self.unit.tl
        stores = [f"{tl}.store({self.part(f'({own})', i)}, {s.name})" for i, s in enumerate(self.sums)]
        adds = [
            f"{s.name} += {tl}.load({self.part(f'({parts})', i)}, cache_modifier='.cg')"
            for i, s in enumerate(self.sums)
        ]
        return [
            *stores,
            # Every thread's part is written before the program counts itself as done.
            f"{tl}.debug_barrier()",
            f"{last} = {tl}.atomic_add({COUNTERS} + {tile}, 1, sem='acq_rel') == {others}",
            f"if {last}:",
            *(f"    {s.name} = {s.zero}" for s in self.sums),
            f"    for {each}:",
            *(f"        {line}" for line in adds),
        ]


def split_reduction(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """Programs along one more grid axis each take a part of the loop, as many as fill the device."""
    shared = _shared_loop(unit)
    if shared is None:
        return
    dots = shared.loop.has_dots
    for place, each in enumerate(_PROGRAMS[dots]):
        programs = MULTIPROCESSORS * each
        note = (
            f"as many programs as fill the device ({programs}) share each sum; the last one adds their parts"
        )
        yield SourceEdit(_split(shared, programs, _MOST_PARTS[dots]), note, 3.2 - 0.4 * place)


def _shared_loop(unit: SourceUnit) -> _SharedLoop | None:
    """The loop whose iterations may be shared; None where that does not show in the text."""
    axes, body = exchangeable_program_ids(unit), unit.entry.body
    existing = names(unit.tree) | set(unit.functions)
    if not axes or max(axes) > 1 or existing & {"grid", "workspace", "RESET_TO_ZERO", *MEMORY}:
        return None
    results = list(loops(unit, unit.entry))
    every = [n for n in ast.walk(unit.entry) if isinstance(n, ast.For | ast.While)]
    if len(results) != 1 or len(every) != 1 or results[0].block is not body or not unit.tl:
        return None
    (loop,) = results
    at = next(i for i, s in enumerate(body) if s is loop.node)
    before, after = body[docstring_length(body) : at], body[at + 1 :]
    if not loop.innermost or loop.may_exit_early or not loop.ascending or not all_accesses_known(unit, body):
        return None
    if unit.effects([*before, loop.node]) - {"load"} or "other" in unit.effects(after) or not after:
        return None
    leaves_early = any(isinstance(n, ast.Return) for n in every_node(after))
    if leaves_early or len(after) > _MOST_STATEMENTS_AFTER or not unit.effects(after):
        return None
    facts = FunctionFacts(unit, unit.entry)
    offsets = moved_offsets(facts, loop)
    sums = [_sum(unit, facts, loop, before, name) for name in sorted(loop.carried_names - offsets)]
    complete = [s for s in sums if s is not None]
    if not complete or len(complete) != len(sums):
        return None
    if loop.used_after(set(assigned_names(loop.node)) - {s.name for s in complete}):
        return None
    return _SharedLoop(unit, facts, loop, tuple(complete), offsets, axes)


def _sum(unit: SourceUnit, facts: FunctionFacts, loop: RangeLoop, before: Block, name: str) -> _Sum | None:
    """The sum that a name holds; None unless it begins at zero, in float32, and is only added to."""
    begins = [s for s in before if name in assigned_names(s)]
    if len(begins) != 1 or not isinstance(begins[0], ast.Assign) or len(begins[0].targets) != 1:
        return None
    zero, itself = begins[0].value, ast.Name(name, ast.Load())
    sides = facts.shape(zero)
    if isinstance(zero, ast.Constant):
        number = isinstance(zero.value, float) and zero.value == 0.0 and facts.shape(itself) == ()
        if not number or not facts.is_float32(itself):
            return None
    elif unit.callee_name(zero) != "zeros" or not ast.unparse(zero).endswith("float32)"):
        return None
    constants = unit.constexprs(unit.entry) & {a.arg for a in arguments(unit.entry)}
    if sides is None or len(sides) > 2 or not all(s.isdigit() or s in constants for s in sides):
        return None
    adds = adding_statement(loop, name)
    if adds is None or not (adds_in_place(unit, adds, name) or _is_sum_with(adds, name)):
        return None
    return _Sum(name, ast.unparse(zero), sides)


def _is_sum_with(statement: ast.stmt, name: str) -> bool:
    """Whether a statement assigns a name its sum with what does not depend on it."""
    value = statement.value if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
        return False
    sides = [value.left, value.right]
    alone = [s for s in sides if isinstance(s, ast.Name) and s.id == name]
    return len(alone) == 1 and sum(name in read_names(s) for s in sides) == 1


def _split(shared: _SharedLoop, programs: int, most: int) -> SourceUnit:
    unit, axis = shared.unit, max(shared.axes) + 1
    draft, tl = unit.copy(), unit.tl
    existing = names(unit.entry) | set(unit.functions)
    parts, skipped, each, tile, last, part = (
        fresh_name(n, existing) for n in ("parts", "skipped", "each", "tile", "last", "part")
    )
    first, end, step = shared.loop.range_bounds
    before = [
        f"{parts} = {tl}.num_programs({axis})",
        f"{each} = {tl}.cdiv({tl}.cdiv({end} - ({first}), {step}), {parts})",
        f"{skipped} = {tl}.program_id({axis}) * {each}",
    ]
    number = f"{tl}.program_id(0)"
    if axis == 2:
        number += f" + {tl}.num_programs(0) * {tl}.program_id(1)"
    hand_over = shared.hand_over(
        tile=tile,
        own=f"{tile} * {parts} + {tl}.program_id({axis})",
        last=last,
        others=f"{parts} - 1",
        each=f"{part} in range({tile} * {parts}, ({tile} + 1) * {parts})",
        parts=part,
    )
    after = [f"{last} = {parts} == 1", f"if {parts} > 1:", f"    {tile} = {number}"]
    after += [f"    {line}" for line in hand_over]
    shared.take_part(draft, before, after, skipped=skipped, count=each, last=last)
    tiles = "first * second" if axis == 2 else "first"
    shape = ", ".join([*["first", "second"][:axis], f"max(1, min({most}, {programs} // max(1, {tiles})))"])
    draft.tree.body += parse_statements(
        f"def grid(meta, arguments, base):\n    first, second = (*base, 1)[:2]\n    return ({shape},)\n"
    )
    of_grid = " * ".join(f"grid[{i}]" for i in range(axis))
    # Nothing is shared where there are programs enough: then no counters are set to zero before a launch.
    sharing = f"({of_grid} if grid[{axis}] > 1 else 0)"
    _add_workspace(draft, shared, f"{sharing} * grid[{axis}]", sharing)
    return draft


def _add_workspace(draft: SourceUnit, shared: _SharedLoop, parts: str, tiles: str) -> None:
    """Add the parameters of a launch's own memory, and the function that sizes it."""
    signature = draft.entry.args
    signature.args += [ast.arg(name) for name in (WORKSPACE, COUNTERS)]
    if signature.defaults:
        signature.defaults += [ast.Constant(None)] * 2
    sides: Sequence[str] = sorted({s for total in shared.sums for s in total.sides if not s.isdigit()})
    elements = shared.elements
    body = "".join(f"    {side} = given['{side}']\n" for side in sides)
    draft.tree.body += parse_statements(
        "def workspace(meta, arguments, base, grid):\n"
        "    given = {**arguments, **meta}\n"
        f"{body}"
        f"    return {parts} * ({elements}), {tiles}\n"
    )
