"""`warm --shapes`: recorded calls of kernels at other sizes, without a program that makes them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from forecast_autotune.commands.output import CommandError, UsageError
from forecast_autotune.records import Argument, Decision, Problem
from forecast_autotune.store import Store
from forecast_autotune.store.misses import Miss
from forecast_integrations.triton.problem.describe import resized_problem
from forecast_integrations.triton.problem.rebuilt_call import (
    RebuildError,
    infer_grids,
    is_stride,
    resize_arguments,
)

MAX_SHAPES = 4096
"""Of one command, all kernels together."""


@dataclass(frozen=True)
class SizedMiss:
    """A recorded call at other sizes."""

    miss: Miss
    sizes: Mapping[str, int]
    """The values that were asked for, by argument."""
    trouble: str = ""
    """Why it cannot be made, if so; then `miss` is the recorded one."""
    elements: Mapping[str, int] = field(default_factory=dict)
    """Storage that tensors need at least, in elements, by argument."""


def parse_shapes(text: str) -> tuple[str, tuple[int, ...]]:
    """`M=1..8192:pow2` (powers of two), `M=16..256:16` (every sixteenth) or `M=1,17,300`: name and values.

    Raises `UsageError` for anything else.
    """
    name, _, values = text.partition("=")
    try:
        if not name.isidentifier():
            raise ValueError
        if ".." in values:
            ends, _, step = values.partition(":")
            low, high = (int(end) for end in ends.split(".."))
            if low < 1 or low > high:
                raise ValueError
            found: Iterable[int]
            if step == "pow2":
                first = (low - 1).bit_length()
                found = (2**i for i in range(first, high.bit_length()) if low <= 2**i <= high)
            else:
                found = range(low, high + 1, int(step or 1))
            listed = tuple(itertools.islice(found, MAX_SHAPES + 1))
        else:
            listed = tuple(sorted({int(v) for v in values.split(",")}))
        if not listed or listed[0] < 1:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"{text!r:.80} are no shapes: write M=1..8192:pow2, M=16..256:16 or M=1,17,300, positive integers"
        ) from None
    return name, listed


def sized_misses(calls: Sequence[Miss], shapes: Sequence[str]) -> list[SizedMiss]:
    """Every combination of the shapes for one call of each kind among `calls`, which has these arguments.

    Of calls that differ in these arguments alone, the largest speaks for all. Raises `UsageError` for shapes that
    are none, and `CommandError` for too many and where no call has such arguments.
    """
    axes = dict(map(parse_shapes, shapes))
    chosen = _largest_of_each_kind([c for c in calls if _has_sizes(c.problem, axes)], axes)
    if not chosen:
        raise CommandError(
            f"no recorded call has the integer argument{'s' if len(axes) > 1 else ''} {', '.join(axes)}: run the "
            "program once with FORECAST_AUTOTUNE_MODE=skip, and it is recorded"
        )
    count = len(chosen) * math.prod(map(len, axes.values()))
    if count > MAX_SHAPES:
        raise CommandError(f"{count} calls are more than {MAX_SHAPES}: give fewer shapes, or --kernel")
    made = [
        _sized(call, dict(zip(axes, values, strict=True)))
        for call in chosen
        for values in itertools.product(*axes.values())
    ]
    # Calls that differ in what follows from these sizes become the same.
    return list({(id(one) if one.trouble else one.miss.problem.id): one for one in made}.values())


def stored_calls(store: Store, kernel: str | None, device: str | None) -> list[Miss]:
    """The problems that the store holds, as calls that can be made again; those of importable modules."""
    decided: dict[str, Decision] = {p.id: d for p, d in store.decisions(kernel, device)}
    found = []
    for table in store.tables(kernel, device):
        rows = table.by_candidate()
        if not rows or not table.problem.kernel.extra.get("module"):
            continue
        grids = {c: m.grid for c, m in rows.items() if m.grid is not None}
        decision = decided.get(table.problem.id)
        count = len(rows) if decision is None else decision.candidates
        found.append(Miss.of(table.problem, "tune", count, grids, ""))
    return found


def _has_sizes(problem: Problem, axes: Mapping[str, object]) -> bool:
    values = {a.name: a.value for a in problem.arguments}
    return all(type(values.get(name)) is int for name in axes)


def _largest_of_each_kind(calls: Sequence[Miss], axes: Mapping[str, object]) -> list[Miss]:
    largest: dict[object, tuple[int, Miss]] = {}
    for call in calls:
        problem = call.problem
        size = math.prod(a.value for a in problem.arguments if a.name in axes and type(a.value) is int)
        kind = (
            problem.kernel.source_sha256,
            problem.device.slug,
            tuple((a.name, a.dtype, _rest(a)) for a in problem.arguments if a.name not in axes),
        )
        if kind not in largest or size > largest[kind][0]:
            largest[kind] = size, call
    return [call for _, call in largest.values()]


def _rest(argument: Argument) -> object:
    """What of an argument tells kinds of calls apart: not shapes, which may follow from the sizes asked for."""
    return None if argument.kind == "tensor" or is_stride(argument.name) else argument.value


def _sized(call: Miss, sizes: Mapping[str, int]) -> SizedMiss:
    problem, arguments = call.problem, call.problem.arguments
    key = list(problem.key)
    elements: dict[str, int] = {}
    try:
        for name, value in sizes.items():
            old = next(a.value for a in arguments if a.name == name)
            resized = resize_arguments(arguments, name, value)
            arguments = resized.arguments
            elements |= {n: max(m, elements.get(n, 0)) for n, m in resized.elements.items()}
            if str(old) in key:
                key[key.index(str(old))] = str(value)
        if sizes == {a.name: a.value for a in problem.arguments if a.name in sizes}:
            return SizedMiss(call, sizes)
        if problem.grid is not None:
            grids = infer_grids((({}, problem.grid),), problem.arguments, arguments)
        else:
            grids = infer_grids(call.grids, problem.arguments, arguments)
    except RebuildError as error:
        return SizedMiss(call, sizes, str(error))
    fixed = grids[0][1] if problem.grid is not None else None
    made = resized_problem(problem, arguments, key, fixed)
    return SizedMiss(replace(call, problem=made, grids=() if fixed else grids), sizes, "", elements)
