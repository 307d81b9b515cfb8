"""The order in which programs take their tiles, and how many programs there are: each tile is computed exactly once.

Where only the order changes, the launch grid stays as it is: programs exchange their numbers, inside the kernel. How
many programs the call would have had, the launcher tells: `grid` receives the call's own grid as `base`, and parameters
named `BASE_GRID_0`, `_1` and `_2` are filled with its extents. Nothing here applies to kernels whose programs wait for
one another.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence

from forecast_harness.authors.triton.analysis.function_facts import FunctionFacts, axis_of
from forecast_harness.authors.triton.analysis.loops import RangeLoop, accesses, loads_may_move, loops
from forecast_harness.authors.triton.analysis.source_unit import (
    BASE_GRID,
    Block,
    SourceUnit,
    arguments,
    assigned_names,
    docstring_length,
    fresh_name,
    names,
    nodes_in_order,
    parse_expression,
    parse_statements,
    read_names,
    swap_expressions,
)
from forecast_harness.authors.triton.protocol import RewriteContext, SourceEdit

GROUP_SIZE = 8
"""Tiles of one group, as in Triton's tutorial."""


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


def _renumber(unit: SourceUnit, code: str, new: dict[int, str]) -> SourceUnit:
    """A copy with statements in front, and names in the place of `program_id` calls by axis."""
    draft = unit.copy()
    entry = draft.entry
    calls = unit.calls(unit.entry, "program_id")
    swap_expressions(
        entry, {id(draft.twin(c)): ast.Name(new[axis_of(c)], ast.Load()) for c in calls if axis_of(c) in new}
    )
    entry.body[docstring_length(entry.body) : docstring_length(entry.body)] = parse_statements(code)
    return draft


def _taken_names(unit: SourceUnit) -> set[str]:
    return names(unit.entry) | set(unit.functions)


def reverse(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """Start with the last tile along axes on which a loop's length depends: the longest work first."""
    ids = exchangeable_program_ids(unit)
    if not ids:
        return
    ends = _range_dependencies(unit)
    for axis in sorted(ids):
        if any(f"pid {axis}" in end - start for start, end in ends):
            name = fresh_name(f"last_{axis}", _taken_names(unit))
            code = f"{name} = {unit.tl}.num_programs({axis}) - 1 - {unit.tl}.program_id({axis})"
            note = f"programs along axis {axis} in reverse, so that long loops do not start last"
            yield SourceEdit(_renumber(unit, code, {axis: name}), note, 3.0)


def _range_dependencies(unit: SourceUnit) -> list[tuple[frozenset[str], frozenset[str]]]:
    """The sources of the first value and of the end of each loop, in the entry and in helpers it calls."""
    facts = FunctionFacts(unit, unit.entry)
    dependencies = []
    for loop in loops(unit, unit.entry):
        first, end, _ = loop.range_bounds
        dependencies.append((facts.sources(parse_expression(first)), facts.sources(parse_expression(end))))
    for call in unit.helper_calls(unit.entry):
        assert isinstance(call.func, ast.Name)
        helper = unit.functions[call.func.id]
        inner = FunctionFacts(unit, helper)
        given = {a.arg: facts.sources(v) for a, v in zip(arguments(helper), call.args, strict=False)}
        given |= {k.arg: facts.sources(k.value) for k in call.keywords if k.arg}
        for loop in loops(unit, helper):
            first, end, _ = loop.range_bounds
            pair = [
                frozenset[str]().union(
                    *(given.get(n, frozenset()) for n in inner.sources(parse_expression(text)))
                )
                for text in (first, end)
            ]
            dependencies.append((pair[0], pair[1]))
    return dependencies


def group(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """Take the tiles of a 2-D grid in bands of eight, so that both operands stay in L2."""
    ids = exchangeable_program_ids(unit)
    if ids is None or not (unit.calls(unit.kernels, "dot", "dot_scaled") or _has_crossed_loads(unit)):
        return
    if {0, 1} <= set(ids):
        yield from _group_axes(unit)
    elif 0 in ids and 1 not in ids:
        yield from _group_split(unit)


def _has_crossed_loads(unit: SourceUnit) -> bool:
    """Whether some loads depend on the first axis only and others on the second only."""
    facts = FunctionFacts(unit, unit.entry)
    seen = [facts.sources(a.pointer) for a in accesses(unit, unit.entry) if a.kind == "load"]
    first = any("pid 0" in s and "pid 1" not in s for s in seen)
    return first and any("pid 1" in s and "pid 0" not in s for s in seen)


def _group_axes(unit: SourceUnit) -> Iterator[SourceEdit]:
    for slow, promise in ((1, 4.0), (0, 3.0)):
        fast, tl, taken = 1 - slow, unit.tl, _taken_names(unit)
        place, band, top, rows = (fresh_name(n, taken) for n in ("place", "band", "band_top", "band_rows"))
        tiles = {axis: fresh_name(f"tile_{axis}", taken) for axis in (0, 1)}
        code = (
            f"{place} = {tl}.program_id(0) + {tl}.program_id(1) * {tl}.num_programs(0)\n"
            f"{band} = {GROUP_SIZE} * {tl}.num_programs({fast})\n"
            f"{top} = {place} // {band} * {GROUP_SIZE}\n"
            f"{rows} = min({tl}.num_programs({slow}) - {top}, {GROUP_SIZE})\n"
            f"{tiles[slow]} = {top} + {place} % {band} % {rows}\n"
            f"{tiles[fast]} = {place} % {band} // {rows}"
        )
        note = f"tiles in bands of {GROUP_SIZE} along axis {slow}, so that what programs share stays in L2"
        yield SourceEdit(_renumber(unit, code, tiles), note, promise)


def _group_split(unit: SourceUnit) -> Iterator[SourceEdit]:
    """One axis that the kernel splits by `//` and `%`: permute its number before it is split.

    Whole bands are permuted; the programs after the last whole row keep their number.
    """
    quotients = _quotients(unit)
    for at, statement in enumerate(unit.entry.body):
        here = [pair for kind in quotients for node, pair in quotients[kind] if _is_within(node, statement)]
        if not here:
            continue
        (number, width), later = here[0], unit.entry.body[at:]
        both = all((number, width) in [pair for _, pair in quotients[kind]] for kind in quotients)
        if (
            not both
            or number in assigned_names(later)
            or any(number in read_names(s) for s in unit.entry.body[:at])
        ):
            return
        draft, taken, tl = unit.copy(), _taken_names(unit), unit.tl
        rows, band, top, tall = (fresh_name(n, taken) for n in ("full_rows", "band", "band_top", "band_rows"))
        code = (
            f"{rows} = {tl}.num_programs(0) // ({width})\n"
            f"{band} = {GROUP_SIZE} * ({width})\n"
            f"{top} = {number} // {band} * {GROUP_SIZE}\n"
            f"{tall} = max(min({rows} - {top}, {GROUP_SIZE}), 1)\n"
            f"{number} = {tl}.where({number} < {rows} * ({width}), "
            f"({top} + {number} % {band} % {tall}) * ({width}) + {number} % {band} // {tall}, {number})"
        )
        draft.entry.body[at:at] = parse_statements(code)
        note = f"tiles in bands of {GROUP_SIZE} rows, so that what programs share stays in L2"
        yield SourceEdit(draft, note, 5.0)
        return


def _is_within(node: ast.AST, statement: ast.stmt) -> bool:
    return any(n is node for n in ast.walk(statement))


def _quotients(unit: SourceUnit) -> dict[type[ast.operator], list[tuple[ast.AST, tuple[str, str]]]]:
    """Where the program's number is divided, and the rest taken: name and divisor. Empty if grouped."""
    facts = FunctionFacts(unit, unit.entry)
    quotients: dict[type[ast.operator], list[tuple[ast.AST, tuple[str, str]]]] = {
        ast.FloorDiv: [],
        ast.Mod: [],
    }
    for n in nodes_in_order(unit.entry):
        if not isinstance(n, ast.BinOp) or not isinstance(n.op, ast.FloorDiv | ast.Mod):
            continue
        if "pid 0" in facts.sources(n.right):  # the last group is smaller: this kernel groups by itself
            return {ast.FloorDiv: [], ast.Mod: []}
        value = facts.single_value(n.left.id) if isinstance(n.left, ast.Name) else None
        if value is not None and unit.callee_name(value) == "program_id" and isinstance(n.left, ast.Name):
            quotients[type(n.op)].append((n, (n.left.id, ast.unparse(n.right))))
    return quotients


def _movable_program_ids(unit: SourceUnit) -> dict[int, list[ast.Call]] | None:
    """`program_id` calls by axis where the launch may be changed and has not been yet."""
    ids = exchangeable_program_ids(unit)
    if not ids or 0 not in ids or "grid" in unit.functions or not unit.tl:
        return None
    return ids


def add_base_grid_parameters(draft: SourceUnit, count: int) -> None:
    """Add the parameters that the launcher fills with the call's own grid."""
    add_parameters(draft, BASE_GRID[:count], 1)


def add_parameters(draft: SourceUnit, added: Sequence[str], default: int | None) -> None:
    """Add runtime parameters that the launcher fills in."""
    given = draft.entry.args
    given.args += [ast.arg(name) for name in added]
    if given.defaults:
        given.defaults += [ast.Constant(default)] * len(added)


def add_grid_function(draft: SourceUnit, body: str) -> None:
    """Add a `grid` whose `first`, `second` and `third` are the call's own extents."""
    text = "def grid(meta, arguments, base):\n    first, second, third = (*base, 1, 1)[:3]\n" + "".join(
        f"    {line}\n" for line in body.splitlines()
    )
    draft.tree.body += parse_statements(text)


def on_one_axis(programs: str, axes: int) -> str:
    """A launch grid of so many programs that take the tiles of the first `axes` axes."""
    return f"({', '.join((programs, *('1', '1')[: axes - 1], *('second', 'third')[axes - 1 :]))})"


# --- few programs, many tiles ---


def persist(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """As many programs as the device runs at a time, each taking tile after tile in a loop."""
    ids = _movable_program_ids(unit)
    body = None if ids is None else _returns_to_branches(unit.entry.body[docstring_length(unit.entry.body) :])
    if ids is None or body is None or unit.effects(unit.entry.body) & {"other"}:
        return
    facts = FunctionFacts(unit, unit.entry)
    inner = [
        n
        for n in ast.walk(unit.entry)
        if isinstance(n, ast.For) and unit.callee_name(n.iter) != "static_range"
    ]
    dots = bool(unit.calls(unit.kernels, "dot", "dot_scaled"))
    calls = any(list(loops(unit, f)) for f in unit.kernels[1:])
    ways: list[tuple[str, str, float]] = []
    if not inner and not calls and not dots and loads_may_move(facts, unit.entry.body):
        for stages, promise in ((2, 6.0), (3, 4.5)):
            ways.append((f", num_stages={stages}", "while the next tile is already being loaded", promise))
    elif dots and len(inner) == 1 and any(s is inner[0] for s in unit.entry.body):
        ways.append((", flatten=True", "without draining the pipeline between tiles", 3.5))
    ways.append(("", "without starting a program for each", 2.0))
    for options, how, promise in ways:
        draft = _persistent_unit(unit, ids, body, options, context)
        if draft is not None:
            yield SourceEdit(draft, f"programs that stay on the device take tile after tile, {how}", promise)


def statements_of_tile(
    unit: SourceUnit, ids: Mapping[int, list[ast.Call]], body: Block, tile: str, taken: set[str]
) -> tuple[Block, Block] | None:
    """A kernel's body for the tile with a number, to stand in a loop: statements to stand before it, and in it.

    `ids`: its `program_id` calls by axis. Parameters that it assigns get another name, as every tile begins with
    their values. None where a constant of it depends on the tile.
    """
    axes = max(ids) + 1
    new = {axis: fresh_name(f"tile_{axis}", taken) for axis in ids} if axes > 1 else {0: tile}
    moved = ast.Module(copy.deepcopy(body), [])
    constants = _hoist_constants(unit, moved.body)
    if constants is None:
        return None
    assigned = set(assigned_names(moved)) & {p.arg for p in arguments(unit.entry)}
    renamed = {name: fresh_name(f"{name}_here", taken) for name in sorted(assigned)}
    calls = unit.calls(moved, "program_id")
    swap_expressions(moved, {id(c): ast.Name(new[axis_of(c)], ast.Load()) for c in calls})
    for n in ast.walk(moved):
        if isinstance(n, ast.Name) and n.id in renamed:
            n.id = renamed[n.id]
    lines = [f"{new_name} = {name}" for name, new_name in renamed.items()]
    if axes > 1:
        extents = {0: f"{tile} % {BASE_GRID[0]}", 1: f"{tile} // {BASE_GRID[0]} % {BASE_GRID[1]}"}
        if axes == 2:
            extents[1] = f"{tile} // {BASE_GRID[0]}"
        extents[2] = f"{tile} // ({BASE_GRID[0]} * {BASE_GRID[1]})"
        lines += [f"{new[axis]} = {extents[axis]}" for axis in sorted(new)]
    return constants, [*parse_statements("\n".join(lines)), *moved.body]


def _persistent_unit(
    unit: SourceUnit, ids: Mapping[int, list[ast.Call]], body: Block, options: str, context: RewriteContext
) -> SourceUnit | None:
    draft, axes = unit.copy(), max(ids) + 1
    entry, taken, tl = draft.entry, names(unit.entry) | set(unit.functions), unit.tl
    tile = fresh_name("tile", taken)
    tile_body = statements_of_tile(unit, ids, body, tile, taken)
    if tile_body is None:
        return None
    constants, statements = tile_body
    total = " * ".join(BASE_GRID[:axes])
    # The number of a tile is computed in the loop: a counter would be an `int` in the interpreter, which
    # has no `.to`.
    turn = fresh_name("turn", taken)
    loop = parse_statements(
        f"for {turn} in {tl}.range({tl}.cdiv({total} - {tl}.program_id(0), {tl}.num_programs(0)){options}):\n"
        f"    {tile} = {tl}.program_id(0) + {turn} * {tl}.num_programs(0)"
    )[0]
    assert isinstance(loop, ast.For)
    loop.body += statements
    entry.body[docstring_length(entry.body) :] = [*constants, loop]
    add_base_grid_parameters(draft, axes)
    # The launch option as a parameter is what `grid` gets to see of it.
    if "num_warps" not in {p.arg for p in arguments(entry)}:
        entry.args.args.append(ast.arg("num_warps", parse_expression(f"{tl}.constexpr")))
        entry.args.defaults += [ast.Constant(4)] * bool(entry.args.defaults)
    product = " * ".join(("first", "second", "third")[:axes])
    warps = 8 if unit.calls(unit.kernels, "dot", "dot_scaled") else 32
    add_grid_function(
        draft,
        f'programs = {context.multiprocessors} * max(1, {warps} // meta["num_warps"])\n'
        f"return {on_one_axis(f'min({product}, programs)', axes)}",
    )
    return draft


# --- more programs, fewer tiles each ---


def spread(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """More programs share the tiles that each of them would have taken one after another.

    A loop over tiles that waits for its loads leaves a multiprocessor idle unless others run there. Every
    tile is still taken once: the step grows with the number of programs, and only where both are the same.
    """
    body = unit.entry.body
    strided = [
        x
        for x in loops(unit, unit.entry)
        if x.block is body and not x.may_exit_early and _is_grid_stride(unit, x)
    ]
    if len(strided) != 1 or "grid" in unit.functions or BASE_GRID[0] in names(unit.tree):
        return
    (loop,) = strided
    step = loop.range_bounds[2]
    before = {
        *assigned_names([s for s in body if s is not loop.node]),
        *(a.arg for a in arguments(unit.entry)),
    }
    # In Triton, a loop hands on only what has a value before it.
    if loop.carried_names & before or loop.used_after(set(assigned_names(loop.node)) & before):
        return
    other = [s for s in body if s is not loop.node]
    if unit.effects(other) - {"load"} or "other" in unit.effects(body):
        return
    every = any(c for f in unit.kernels for c in unit.calls(f, "num_programs"))
    for times, promise in ((4, 8.0), (2, 6.5), (16, 5.0)):
        draft = unit.copy()
        head = draft.twin(loop.node).iter
        assert isinstance(head, ast.Call)
        if every:
            add_grid_function(draft, f"return (first * {times}, second, third)")
        else:
            tl = unit.tl
            wider = f"{step} * ({tl}.num_programs(0) // {BASE_GRID[0]})"
            head.args = [*head.args[:2], parse_expression(wider)]
            head.keywords = [k for k in head.keywords if k.arg != "step"]
            add_grid_function(
                draft, f'return (first * {times} if first == meta["{step}"] else first, second, third)'
            )
        add_base_grid_parameters(draft, 1)
        yield SourceEdit(draft, f"{times} times as many programs, each with as many fewer tiles", promise)


def _is_grid_stride(unit: SourceUnit, loop: RangeLoop) -> bool:
    """Whether a loop begins at the program's number, moves by their count, and nothing else knows of both."""
    first, _, step = loop.range_bounds
    facts = FunctionFacts(unit, unit.entry)
    calls = [c for f in unit.kernels for c in unit.calls(f, "program_id", "num_programs") if axis_of(c) < 1]
    begin, by = (
        (facts.single_value(t) or parse_expression(t)) if t.isidentifier() else parse_expression(t)
        for t in (first, step)
    )
    if unit.callee_name(begin) != "program_id" or axis_of(begin) != 0:
        return False
    uses = [n.id for n in ast.walk(unit.entry) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    if any(t.isidentifier() and uses.count(t) != 1 for t in (first, step)):
        return False
    if unit.callee_name(by) == "num_programs":
        return axis_of(by) == 0 and len(calls) == 2 and not _may_wait_for_others(unit)
    constant = step in unit.constexprs(unit.entry) & {a.arg for a in arguments(unit.entry)}
    return constant and len(calls) == 1 and not _may_wait_for_others(unit)


def _may_wait_for_others(unit: SourceUnit) -> bool:
    """Whether programs may wait for one another."""
    turns = any(isinstance(n, ast.While) for f in unit.kernels for n in ast.walk(f))
    return turns or bool(unit.calls(unit.kernels, "atomic_cas", "atomic_xchg"))


def _hoist_constants(unit: SourceUnit, body: Block) -> Block | None:
    """Take the statements that name constants out of a body; None where one depends on anything else."""
    known = unit.constexprs(unit.entry) | {unit.tl, "triton"}
    constants = [s for s in body if isinstance(s, ast.AnnAssign)]
    nested = [n for s in body for n in ast.walk(s) if isinstance(n, ast.AnnAssign)]
    if len(nested) != len(constants) or any(
        s.value is None or not read_names(s.value) <= known for s in constants
    ):
        return None
    body[:] = [s for s in body if not isinstance(s, ast.AnnAssign)]
    return list(constants)


def _returns_to_branches(body: Block) -> Block | None:
    """A body in which what follows an early return stands in the other branch; None for returns elsewhere."""
    done: Block = []
    for at, statement in enumerate(body):
        if not any(isinstance(n, ast.Return) for n in ast.walk(statement)):
            done.append(statement)
            continue
        if isinstance(statement, ast.Return):
            return done if statement.value is None and done else None
        leaves = (
            isinstance(statement, ast.If)
            and not statement.orelse
            and isinstance(statement.body[-1], ast.Return)
        )
        rest = _returns_to_branches(body[at + 1 :]) if leaves and at + 1 < len(body) else None
        if rest is None or not isinstance(statement, ast.If):
            return None
        before = statement.body[:-1]
        if any(isinstance(n, ast.Return) for s in before for n in ast.walk(s)):
            return None
        return [*done, ast.If(statement.test, before or [ast.Pass()], rest)]
    return done


# --- two tiles for each program ---
