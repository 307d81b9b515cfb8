"""Which candidates to trace to TTIR, and when: a handful for a first guess, then all of a small list or a
spread sample of a large one, then whatever the forecasts think best.

Of a large one, too, what tells which meta-parameters are inert (`features.inert_parameters`): what differs from
a traced assignment in these alone need not be traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.candidate_list import CandidateList, Codes
from forecast_autotune.features.config_encoder import ConfigEncoder
from forecast_autotune.features.inert_parameters import equivalence_classes, find_inert, trace_parameters
from forecast_autotune.features.stored_facts import cached_facts
from forecast_autotune.features.ttir.facts import TtirFacts
from forecast_autotune.numerics import fast_median
from forecast_autotune.records import Candidate, Problem

Tracer = Callable[[Sequence[Candidate]], Mapping[str, str]]
"""TTIR by assignment key, for the candidates asked for."""
FactReader = Callable[[Candidate, str], TtirFacts | None]
"""The facts of a candidate's TTIR; None for text that cannot be read."""

FIRST_GUESS_TRACES = 3
"""Traced before the first compilation starts; one costs about 15 ms with parsing, and holds the GIL."""
FULL_TRACE_LIMIT = 64
"""Distinct assignments of a list up to which every one is traced at once."""
SPREAD_TRACES = 32
"""Assignments of a longer list that are traced first, spread over the space."""
DISTINCT_TRACE_LIMIT = 128
"""Where inert meta-parameters leave no more than so many assignments that differ, one of each is traced."""
TRACES_PER_ROUND = 16
"""Assignments of the best forecasts that are traced whenever the forecasts change."""
PROBED_ASSIGNMENTS = 2
"""Assignments around which each meta-parameter is varied by itself, to its first and its last value."""


class LazyTraces:
    """TTIR texts of one task, gathered lazily. Warps and stages do not change TTIR."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        trace: Tracer | None,
        read: FactReader | None = None,
    ) -> None:
        """Without `trace` there is no IR; without `read`, no meta-parameter is found to be inert."""
        self.texts: dict[str, str] = {}
        self._candidates = CandidateList.of(candidates)
        self._trace, self._read = trace, read
        self._asked: set[int] = set()
        """Assignments, as `CandidateList.assignments` numbers them."""

    def trace_first_guess(self) -> CandidateList:
        """Trace a few assignments that cover the space; the candidates that have their IR then.

        None where there are hardly more than a few. What is traced later does not depend on it. It saves
        time even where the tracer remembers all texts: reading one takes a millisecond.
        """
        count = len(self._candidates.assignments[0]) if self._trace is not None else 0
        if count <= 2 * FIRST_GUESS_TRACES:
            return CandidateList()
        # Of a large list, a handful of what `trace_initial` will ask for: farthest points come first.
        self._trace_assignments(
            self._initial_assignments[:FIRST_GUESS_TRACES]
            if count > FULL_TRACE_LIMIT
            else self._farthest_assignments(range(count), FIRST_GUESS_TRACES)
        )
        names, keys = self._candidates.assignments
        read = np.array([name in self.texts for name in names], dtype=bool)
        return CandidateList(self._candidates[i] for i in np.flatnonzero(read[keys]))

    def trace_initial(self, *, everything: bool = False) -> None:
        """The first traces: every assignment of a small list, or a sample that covers a large one."""
        if self._trace is None:
            return
        count = len(self._candidates.assignments[0])
        self._trace_assignments(range(count) if everything else self._initial_assignments)
        if count > FULL_TRACE_LIMIT and not everything and self._read is not None:
            self._find_inert_parameters(self._read)

    def trace_best(self, order: npt.NDArray[np.intp]) -> bool:
        """Trace the best-ranked candidates not traced yet; True if anything new came in."""
        names, keys = self._candidates.assignments
        if self._trace is None or len(self._asked) >= len(names):
            return False
        done = [i for i in self._asked if names[i] in self.texts]
        left = ~np.isin(self._fact_classes, self._fact_classes[done])
        left[list(self._asked)] = False
        ranked = keys[order]
        ranked = ranked[left[ranked]]
        best = np.sort(np.unique(self._fact_classes[ranked], return_index=True)[1])
        before = len(self.texts)
        self._trace_assignments(ranked[best][:TRACES_PER_ROUND].tolist())
        return len(self.texts) > before

    def _find_inert_parameters(self, read: FactReader) -> None:
        """Find the inert meta-parameters. What is left of the space is traced whole if it is small."""
        columns = trace_parameters(self._candidates)
        self._trace_assignments(
            list(
                dict.fromkeys(
                    i
                    for base in self._initial_assignments[:PROBED_ASSIGNMENTS]
                    for i in self._neighbours(base)
                )
            )
        )
        names = self._candidates.assignments[0]
        traced = [(self._first_rows[i], self.texts[names[i]]) for i in self._asked if names[i] in self.texts]
        known = {row: facts for row, text in traced if (facts := read(self._candidates[row], text))}
        inert = find_inert(columns, np.array(list(known), dtype=np.intp), list(known.values()))
        if not inert:
            return
        self._fact_classes = equivalence_classes(columns, np.array(self._first_rows, dtype=np.intp), inert)
        first = np.unique(self._fact_classes, return_index=True)[1]
        if len(first) <= DISTINCT_TRACE_LIMIT:
            done = set(self._fact_classes[list(self._asked)].tolist())
            self._trace_assignments([i for i in first.tolist() if int(self._fact_classes[i]) not in done])

    def _neighbours(self, base: int) -> list[int]:
        """Of each meta-parameter, two assignments that differ from this one in it alone, if there are any."""
        columns, keys = trace_parameters(self._candidates), self._candidates.assignments[1]
        same = {name: c.codes == c.codes[self._first_rows[base]] for name, c in columns.items()}
        found: dict[int, None] = {}
        for name in columns:
            others = [agrees for other, agrees in same.items() if other != name]
            rows = np.flatnonzero(np.logical_and.reduce([~same[name], *others]))
            found |= dict.fromkeys(keys[rows[[0, -1]]].tolist() if len(rows) else ())
        return list(found)

    @cached_property
    def _initial_assignments(self) -> Sequence[int]:
        count = len(self._candidates.assignments[0])
        return (
            range(count)
            if count <= FULL_TRACE_LIMIT
            else self._farthest_assignments(range(count), SPREAD_TRACES)
        )

    @cached_property
    def _fact_classes(self) -> Codes:
        """Which assignments are known to have the same facts, by numbers that say nothing else."""
        return np.arange(len(self._candidates.assignments[0]))

    def _farthest_assignments(self, assignments: Sequence[int], count: int) -> list[int]:
        chosen = farthest_point_sample(self._examples(assignments), count)
        keys = self._candidates.assignments[1]
        return [int(keys[self._candidates.row_of[c]]) for c in chosen]

    def _examples(self, assignments: Sequence[int]) -> list[Candidate]:
        """The first candidate of each of these assignments."""
        return [self._candidates[self._first_rows[i]] for i in assignments]

    @cached_property
    def _first_rows(self) -> list[int]:
        """Row of the first candidate of every assignment."""
        rows: list[int] = np.unique(self._candidates.assignments[1], return_index=True)[1].tolist()
        return rows

    def _trace_assignments(self, assignments: Sequence[int]) -> None:
        fresh = [i for i in assignments if i not in self._asked]
        if self._trace is None or not fresh:
            return
        self.texts.update(self._trace(self._examples(fresh)))
        self._asked.update(fresh)


def fact_reader(problem: Problem, grids: Mapping[Candidate, tuple[int, ...]]) -> FactReader:
    """Reads TTIR as it runs at this problem; `grids` are the launch grids that depend on the candidate."""

    def read(candidate: Candidate, text: str) -> TtirFacts | None:
        return cached_facts(text, problem.arguments, grids.get(candidate, problem.grid))

    return read


def farthest_point_sample(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """`count` candidates that cover the space: farthest-point sampling from the middle outwards."""
    points = ConfigEncoder.of(candidates, meta_only=True)(candidates)
    middle = int(np.argmin(((points - fast_median(points, axis=0)) ** 2).sum(axis=1)))
    chosen = [middle]
    nearest = ((points - points[middle]) ** 2).sum(axis=1)
    while len(chosen) < min(count, len(candidates)):
        far = int(np.argmax(nearest))
        chosen.append(far)
        nearest = np.minimum(nearest, ((points - points[far]) ** 2).sum(axis=1))
    return [candidates[i] for i in chosen]
