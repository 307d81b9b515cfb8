"""A launch grid as a formula: a grid function, inferred from its results in recorded launches.

A recorded problem keeps the grid of every config it measured, not the function. Most grid functions are
products of sizes, meta-parameters and rounded-up quotients of the two, so the simplest product that explains
all recorded launches of a kernel is taken. Whether it is right for other sizes is tried, not believed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from forecast_autotune.records import Argument, Scalar
from forecast_autotune.records.table import Table
from forecast_autotune.variants.signature import places

_MAX_FACTORS = 3
"""Factors of one axis at most."""
_MAX_SAMPLES = 64
"""Recorded launches that a formula is made of; all have to agree with it."""
_REPAIRS = 4


@dataclass(frozen=True)
class GridSample:
    """One recorded launch: sizes by place, meta-parameters by name, the grid."""

    sizes: Mapping[str, int]
    meta: Mapping[str, Scalar]
    grid: tuple[int, ...]


@dataclass(frozen=True)
class CeilDivFactor:
    """`ceil(over / under)`, of which either product may be empty (1)."""

    over: tuple[str, ...] = ()
    """Places whose sizes are multiplied."""
    under: tuple[str, ...] = ()
    """Meta-parameters; without `over` they are multiplied instead."""

    def value(self, sizes: Mapping[str, int], meta: Mapping[str, Scalar]) -> int:
        """Raises `KeyError` for a name that is not there, `TypeError` for one that is no number."""
        low = math.prod(_as_int(meta[name]) for name in self.under)
        if not self.over:
            return low
        return -(-math.prod(sizes[p] for p in self.over) // max(low, 1))

    def __str__(self) -> str:
        over, under = "*".join(self.over), "*".join(self.under)
        return f"cdiv({over}, {under})" if over and under else over or under or "1"


@dataclass(frozen=True)
class GridFormula:
    """The grid: one product of factors per axis."""

    axes: tuple[tuple[CeilDivFactor, ...], ...]

    def __call__(self, arguments: Sequence[Argument], meta: Mapping[str, Scalar]) -> tuple[int, ...]:
        """The grid of a call. Raises `KeyError` or `TypeError` where a parameter is missing or no number."""
        return self.at_sizes(sizes_of(arguments), meta)

    def at_sizes(self, sizes: Mapping[str, int], meta: Mapping[str, Scalar]) -> tuple[int, ...]:
        """The grid from sizes by place."""
        return tuple(math.prod(f.value(sizes, meta) for f in axis) for axis in self.axes)

    def __str__(self) -> str:
        return "(" + ", ".join(" * ".join(map(str, axis)) or "1" for axis in self.axes) + ")"


def grid_samples(table: Table) -> list[GridSample]:
    """The recorded launches of the base kernel in a table."""
    problem = table.problem
    sizes = sizes_of(problem.arguments)
    constants = {a.name: a.value for a in problem.arguments if a.kind == "constexpr"}
    samples = []
    for m in table.measurements:
        grid = m.grid or problem.grid
        if grid is not None and m.candidate.is_base_variant:
            samples.append(GridSample(sizes, {**constants, **dict(m.candidate.config.kwargs)}, grid))
    return list({(tuple(sorted(x.meta.items(), key=str)), x.grid): x for x in samples}.values())


@dataclass(frozen=True)
class GridFormulaSwitch:
    """A formula for each value of a meta-parameter that is no number: an order of axes, say."""

    name: str
    formulas: Mapping[Scalar, GridFormula]

    def __call__(self, arguments: Sequence[Argument], meta: Mapping[str, Scalar]) -> tuple[int, ...]:
        """The grid of a call. Raises `KeyError` or `TypeError` where a parameter is missing or unknown."""
        return self.formulas[meta[self.name]](arguments, meta)

    def __str__(self) -> str:
        return " | ".join(f"{self.name}={value}: {formula}" for value, formula in self.formulas.items())


def fit_grid(samples: Sequence[GridSample]) -> GridFormula | GridFormulaSwitch | None:
    """The simplest formula that explains all of them; None when there is none, or nothing was recorded."""
    if (grid := _fit_formula(samples)) is not None or not samples:
        return grid
    words = [n for n, v in samples[0].meta.items() if isinstance(v, bool | str)]
    for name in words:
        values = {x.meta.get(name) for x in samples}
        parts = {v: _fit_formula([x for x in samples if x.meta.get(name) == v]) for v in values}
        if len(parts) > 1 and None not in parts.values():
            return GridFormulaSwitch(name, {v: part for v, part in parts.items() if part is not None})
    return None


def _fit_formula(samples: Sequence[GridSample]) -> GridFormula | None:
    if not samples or len({len(x.grid) for x in samples}) != 1:
        return None
    # A draw, for lists of configs are products: every so many-th would have the same values.
    subset = random.Random(0).sample(samples, min(_MAX_SAMPLES, len(samples)))
    for _ in range(_REPAIRS):
        atoms = _FactorSearch(subset)
        axes = [atoms.explain(tuple(x.grid[axis] for x in subset)) for axis in range(len(subset[0].grid))]
        formula = GridFormula(tuple(axis for axis in axes if axis is not None))
        if None in axes:
            return None
        wrong = [x for x in samples if formula.at_sizes(x.sizes, x.meta) != x.grid]
        if not wrong:
            return formula
        subset = [*subset, *wrong[:_MAX_SAMPLES]]
    return None


@dataclass
class _FactorSearch:
    """Factors of a grid by their values over all recorded launches, simplest first."""

    rows: Sequence[GridSample]

    @cached_property
    def by_values(self) -> dict[tuple[int, ...], CeilDivFactor]:
        factors: dict[tuple[int, ...], CeilDivFactor] = {}
        for factor in self._all():
            try:
                values = tuple(factor.value(x.sizes, x.meta) for x in self.rows)
            except (KeyError, TypeError):
                continue
            if min(values) > 0:
                factors.setdefault(values, factor)
        return factors

    def _all(self) -> Iterator[CeilDivFactor]:
        metas = [n for n, v in self.rows[0].meta.items() if isinstance(v, int) and not isinstance(v, bool)]
        sizes = list(self.rows[0].sizes)
        yield CeilDivFactor()
        yield from (CeilDivFactor((p,), (n,)) for p in sizes for n in metas)
        yield from (CeilDivFactor((p,)) for p in sizes)
        yield from (CeilDivFactor((), (n,)) for n in metas)
        yield from (
            CeilDivFactor((p,), (n, m)) for p in sizes for i, n in enumerate(metas) for m in metas[i + 1 :]
        )

    def explain(self, target: tuple[int, ...], depth: int = _MAX_FACTORS) -> tuple[CeilDivFactor, ...] | None:
        """The shortest product of factors with these values."""
        for length in range(1, depth + 1):
            if (product := self._product(target, length)) is not None:
                return product
        return None

    def _product(self, target: tuple[int, ...], length: int) -> tuple[CeilDivFactor, ...] | None:
        if length == 1:
            factor = self.by_values.get(target)
            return None if factor is None else (factor,)
        for values, factor in self.by_values.items():
            if max(values) == 1 or any(w % v for w, v in zip(target, values, strict=True)):
                continue
            quotient = tuple(w // v for w, v in zip(target, values, strict=True))
            if (rest := self._product(quotient, length - 1)) is not None:
                return (factor, *rest)
        return None


def sizes_of(arguments: Sequence[Argument]) -> dict[str, int]:
    """Every size by place, and every tensor's number of elements as `x.numel`."""
    counts = {f"{a.name}.numel": math.prod(a.shape) for a in arguments if a.kind == "tensor" and a.shape}
    return {**places(arguments), **counts}


def _as_int(value: Scalar) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no size")
    return value
