"""A launch grid at another size, where only the grids of one size are recorded: which formula gives all of them?

Formulas are products of sizes of the call, whole or divided by a meta-parameter and rounded up, as nearly every grid
is. What no formula gives, or several give that differ at the other size, is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forecast_autotune.records import Argument
from forecast_autotune.store.misses import Grids
from forecast_integrations.triton.problem.rebuilt_call import RebuildError

MAX_FACTORS = 3


@dataclass(frozen=True)
class _Factor:
    """A size of the call or, with a meta-parameter, the number of blocks of it."""

    name: str
    before: int
    after: int
    parameter: str = ""

    def at(self, size: int, parameters: Mapping[str, Any]) -> int:
        return -(-size // parameters[self.parameter]) if self.parameter else size

    @property
    def is_named_alike(self) -> bool:
        """`M` and `BLOCK_SIZE_M`: then they belong together."""
        return self.name.lower() in self.parameter.lower().split("_")


@dataclass(frozen=True)
class _GridColumn:
    """One dimension of the grids at the other size, by meta-parameters."""

    extents: tuple[int, ...]
    follows: bool
    """Whether its formula has a size in it that is another one there."""


def infer_grids(grids: Grids, before: Sequence[Argument], after: Sequence[Argument]) -> Grids:
    """The grids by meta-parameters at another size; `before` and `after` are the arguments at both.

    Raises `RebuildError` where that cannot be told.
    """
    dimensions = {len(grid) for _, grid in grids}
    if len(dimensions) != 1:
        raise RebuildError("no launch grids are recorded, or of several ranks")
    parameters = [given for given, _ in grids]
    columns = [
        _column(parameters, [grid[d] for _, grid in grids], before, after) for d in range(dimensions.pop())
    ]
    sizes, later = dict(_sizes(before)), dict(_sizes(after))
    if not any(column.follows for column in columns) and any(later[n] > sizes[n] for n in sizes):
        # A smaller call is served by the grid of a larger one: programs beyond its end find nothing to do.
        raise RebuildError("the recorded launch grids do not follow the size, as far as can be seen")
    return tuple((given, tuple(c.extents[i] for c in columns)) for i, given in enumerate(parameters))


def _column(
    parameters: Sequence[Mapping[str, Any]],
    extents: Sequence[int],
    before: Sequence[Argument],
    after: Sequence[Argument],
) -> _GridColumn:
    if set(extents) == {1}:
        return _GridColumn(tuple(extents), False)
    found: dict[tuple[int, int], set[_GridColumn]] = {}
    for factors in _products(_factors(parameters, before, after), parameters[0], extents[0]):
        told = [math.prod(f.at(f.before, p) for f in factors) for p in parameters]
        if told == list(extents):
            rank = len(factors), -sum(f.is_named_alike for f in factors)
            made = tuple(math.prod(f.at(f.after, p) for f in factors) for p in parameters)
            found.setdefault(rank, set()).add(_GridColumn(made, any(f.before != f.after for f in factors)))
    if not found:
        raise RebuildError(
            f"no formula of the call's sizes gives its launch grids {sorted(set(extents))[:4]}"
        )
    best = found[min(found)]
    if len({column.extents for column in best}) > 1:
        raise RebuildError(
            f"{len(best)} formulas of the call's sizes give its launch grids, and differ at the other size"
        )
    return max(best, key=lambda column: column.follows)


def _factors(
    parameters: Sequence[Mapping[str, Any]], before: Sequence[Argument], after: Sequence[Argument]
) -> list[_Factor]:
    sizes: dict[tuple[int, int], str] = {}
    later = dict(_sizes(after))
    for name, size in _sizes(before):
        if size > 1 or later[name] > 1:
            sizes.setdefault((size, later[name]), name)
    names = [
        name for name in parameters[0] if all(type(p.get(name)) is int and p[name] > 0 for p in parameters)
    ]
    return [_Factor(name, *pair, parameter) for pair, name in sizes.items() for parameter in ("", *names)]


def _sizes(arguments: Sequence[Argument]) -> Iterator[tuple[str, int]]:
    """Integer arguments, then numbers of elements and dimensions of tensors, by name."""
    for a in arguments:
        if a.kind in ("scalar", "constexpr") and type(a.value) is int and a.value > 0:
            yield a.name, a.value
    for a in arguments:
        if a.kind == "tensor":
            yield f"numel({a.name})", math.prod(a.shape)
            yield from ((f"{a.name}.{d}", n) for d, n in enumerate(a.shape))


def _products(
    factors: Sequence[_Factor], parameters: Mapping[str, Any], extent: int
) -> Iterator[tuple[_Factor, ...]]:
    """Products of few factors that give this extent under these parameters."""
    fit = [f for f in factors if extent % f.at(f.before, parameters) == 0]
    for count in range(1, MAX_FACTORS + 1):
        for chosen in itertools.combinations(fit, count):
            if math.prod(f.at(f.before, parameters) for f in chosen) == extent:
                yield chosen
