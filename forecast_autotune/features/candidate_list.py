"""A list of candidates with its derived data: columns, rows by candidate, assignments, units.

A decision forecasts the same list many times. Loops over candidates in Python are done here, once,
and where possible over the distinct values instead; other modules work on arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.records import LAUNCH_OPTIONS, Candidate, is_base_variant

Codes = npt.NDArray[np.intp]
Grid = tuple[int, ...] | None

OPTIONS_OF_NO_TTIR = LAUNCH_OPTIONS[:2]
"""Warps and stages do not change the TTIR."""
_LARGEST = 2**60
"""Limit of combined codes: they must fit into 64 bits."""


@dataclass(frozen=True)
class Column:
    """One value per candidate, as codes [n] into the distinct values, which are in order of appearance."""

    values: tuple[Any, ...]
    codes: Codes

    @classmethod
    def of(cls, values: Sequence[Hashable]) -> Column:
        """Values that are equal but of different types (1, True) stay apart."""
        keys: Sequence[Hashable] = values
        if len(set(map(type, values))) > 1:
            keys = list(zip(map(type, values), values, strict=True))
        first: dict[Hashable, int] = {}
        for key in keys:
            first.setdefault(key, len(first))
        codes = np.fromiter(map(first.__getitem__, keys), dtype=np.intp, count=len(keys))
        distinct = tuple(first) if keys is values else tuple(key[1] for key in first)  # type: ignore[index]
        return cls(distinct, codes)


@dataclass(frozen=True)
class TraceUnits:
    """Candidates that share TTIR, all of their meta-parameters and the launch grid, taken together."""

    first: Codes
    """Row of the first candidate of each unit, [units]."""
    of: Codes
    """Unit of each candidate, [n]."""
    sizes: npt.NDArray[np.float64]
    """Candidates per unit, [units]."""
    grids: list[Grid]
    """Launch grid per candidate, length n; None where it is unknown."""


class CandidateList(tuple[Candidate, ...]):
    """Candidates in order; see the module."""

    @classmethod
    def of(cls, candidates: Iterable[Candidate]) -> CandidateList:
        """A list of these candidates; a `CandidateList` itself, with its cached data."""
        return candidates if isinstance(candidates, cls) else cls(candidates)

    @cached_property
    def row_of(self) -> dict[Candidate, int]:
        """Row of each candidate; the last one of duplicates."""
        return dict(zip(self, range(len(self)), strict=True))

    def mask_of(self, wanted: Collection[Candidate]) -> npt.NDArray[np.bool_]:
        """Which candidates are among `wanted`, [n]."""
        if len(self.row_of) < len(self):  # duplicates
            return np.array([c in wanted for c in self], dtype=bool)
        results = np.zeros(len(self), dtype=bool)
        results[[self.row_of[c] for c in wanted if c in self.row_of]] = True
        return results

    @cached_property
    def sources(self) -> int:
        """Number of the candidates' sources; the user's own counts as one, whatever its hooks."""
        return len({"" if is_base_variant(name) else name for name in self.columns["variant"].values})

    @cached_property
    def columns(self) -> dict[str, Column]:
        """Every parameter by name, `variant` among them; None where a candidate lacks it."""
        kwargs = [c.config.kwargs for c in self]
        results = self._uniform_kwargs
        if results is None:
            rows = [dict(pairs) for pairs in kwargs]
            names = dict.fromkeys(name for row in rows for name in row)
            results = {name: [row.get(name) for row in rows] for name in names}
        configs = [c.config for c in self]
        for name in (*LAUNCH_OPTIONS, "ir_override"):
            values = [getattr(config, name) for config in configs]
            if name in results:  # a meta-parameter of this name counts where the launch option is not given
                values = [b if a is None else a for a, b in zip(values, results[name], strict=True)]
            results = {**results, name: values}
        results = {**results, "variant": [c.variant for c in self]}
        return {name: Column.of(values) for name, values in results.items()}

    @cached_property
    def assignments(self) -> tuple[tuple[str, ...], Codes]:
        """The distinct `assignment_of` in order of appearance, and the number of each candidate's, [n]."""
        if self._uniform_kwargs is None:
            column = Column.of([assignment_of(c) for c in self])
            return column.values, column.codes
        sources = Column.of(["" if c.is_base_variant else c.variant for c in self])
        columns = [sources, *(Column.of(values) for values in self._uniform_kwargs.values())]
        first, codes = group_rows(columns, len(self))
        names = tuple(assignment_of(self[i]) for i in first)
        column = Column.of(names)  # 1 and "1" are written alike
        return column.values, column.codes[codes] if len(names) else codes

    def units(self, grids: Mapping[Candidate, tuple[int, ...]], default: Grid) -> TraceUnits:
        """Units under these launch grids; `default` is the grid of candidates that are not in `grids`.

        Cached for the latest `grids`: the mapping must not change afterwards.
        """
        if self._units is None or self._units[0] is not grids or self._units[1] != default:
            self._units = (grids, default, self._group_units(grids, default))
        return self._units[2]

    def _group_units(self, grids: Mapping[Candidate, tuple[int, ...]], default: Grid) -> TraceUnits:
        launch_grids = [grids.get(c, default) for c in self] if grids else [default] * len(self)
        names, keys = self.assignments
        meta = [column for name, column in self.columns.items() if name not in OPTIONS_OF_NO_TTIR]
        first, of = group_rows([*meta, Column(names, keys), Column.of(launch_grids)], len(self))
        return TraceUnits(first, of, np.bincount(of, minlength=len(first)).astype(float), launch_grids)

    _units: tuple[Mapping[Candidate, tuple[int, ...]], Grid, TraceUnits] | None = None

    @cached_property
    def _uniform_kwargs(self) -> dict[str, Sequence[Any]] | None:
        """Meta-parameters by name, when all candidates have the same names."""
        kwargs = [c.config.kwargs for c in self]
        if len(set(map(len, kwargs))) != 1:
            return None
        results: dict[str, Sequence[Any]] = {}
        # Not by zip(*kwargs): thousands of iterators alive at once set off a full garbage collection.
        for place, (name, _) in enumerate(kwargs[0]):
            if any(pairs[place][0] != name for pairs in kwargs):
                return None
            results[name] = [pairs[place][1] for pairs in kwargs]
        return results


def group_rows(columns: Sequence[Column], n: int) -> tuple[Codes, Codes]:
    """Rows that agree in all columns: (first row of each group [groups], group of each row [n]).

    Groups are numbered in order of appearance.
    """
    codes, size = np.zeros(n, dtype=np.intp), 1
    for column in columns:
        if len(column.values) < 2:
            continue
        if size * len(column.values) > _LARGEST:
            codes = np.unique(codes, return_inverse=True)[1].reshape(n)
            size = n
        codes = codes * len(column.values) + column.codes
        size *= len(column.values)
    _, index, inverse = np.unique(codes, return_index=True, return_inverse=True)
    order = np.argsort(index, kind="stable")
    rank = np.empty(len(order), dtype=np.intp)
    rank[order] = np.arange(len(order))
    return index[order], rank[inverse.reshape(n)]
