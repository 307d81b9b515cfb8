"""Tracing of candidates to TTIR: all of a small list or a spread sample of a large one, then
whatever the forecasts think best.

In a large one, traces also show which meta-parameters are inert (`features.inert_parameters`): an assignment that
differs from a traced one in these alone need not be traced.

A tracer that works in the background is started and polled; any other is called, and waited for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.candidate_list import CandidateList, Codes, Grid
from forecast_autotune.features.config_encoder import ConfigEncoder
from forecast_autotune.features.inert_parameters import equivalence_classes, find_inert, trace_parameters
from forecast_autotune.features.traced_texts import TracedTexts, cached_facts, facts_by_unit
from forecast_autotune.features.ttir.extraction import assignment_of, cached_module
from forecast_autotune.features.ttir.facts import TtirFacts
from forecast_autotune.numerics import fast_median
from forecast_autotune.records import Candidate, Problem
from forecast_autotune.telemetry.spans import span

Tracer = Callable[[Sequence[Candidate]], Mapping[str, str]]
"""TTIR by assignment key, for the candidates asked for: one of every assignment and launch grid."""
FactReader = Callable[[Candidate, str], TtirFacts | None]
"""The facts of a candidate's TTIR; None for text that cannot be read."""


@runtime_checkable
class BackgroundTracer(Protocol):
    """A tracer that need not be waited for."""

    def __call__(self, wanted: Sequence[Candidate]) -> Mapping[str, str]:
        """Trace, and wait for it."""
        ...

    def start(self, wanted: Sequence[Candidate]) -> None:
        """Begin to trace; returns at once. Texts come out of `poll`."""
        ...

    def poll(self, timeout_s: float) -> Mapping[str, str]:
        """Texts since the last call; waits `timeout_s` at most for the first of them."""
        ...

    @property
    def outstanding(self) -> int:
        """Number of requested assignments that are neither traced yet nor known to fail."""
        ...

    def close(self) -> None:
        """Give up what is outstanding; it may be asked for again."""
        ...


FULL_TRACE_LIMIT = 64
"""Distinct assignments of a list up to which every one is traced at once."""
SPREAD_TRACES = 32
"""Assignments of a longer list that are traced first, spread over the space."""
DISTINCT_TRACE_LIMIT = 128
"""Most classes of assignments, equal but for inert meta-parameters, of which one each is traced."""
TRACES_PER_ROUND = 16
"""Assignments of the best forecasts that are traced whenever the forecasts change."""
READ_HERE_CHARACTERS = 150_000
"""Characters of known text that this process parses sooner than it starts children and gets their answer: some 50 ms,
half of that where it has parsed the text before."""
_PARSE_S = 0.03
"""Seconds of parsing before the loop looks for other work again."""
_POLL_S = 0.25
"""Longest wait for the background at a time."""
PROBED_ASSIGNMENTS = 2
"""Assignments around which each meta-parameter is varied by itself, to its first and its last value."""


class LaunchFacts:
    """The facts of candidates' TTIR as it runs at one problem."""

    def __init__(self, problem: Problem, grids: Mapping[Candidate, tuple[int, ...]]) -> None:
        """`grids` are the launch grids that depend on the candidate."""
        self.problem, self.grids = problem, grids
        self.texts = TracedTexts(problem.arguments)
        """TTIR by assignment, with the facts that came along with it."""

    def __call__(self, candidate: Candidate, text: str) -> TtirFacts | None:
        """The facts of a candidate's text; None for text that cannot be read."""
        grid = self.grids.get(candidate, self.problem.grid)
        if (name := assignment_of(candidate)) in self.texts:
            return self.texts.facts(name, self.problem.arguments, grid)
        return cached_facts(text, self.problem.arguments, grid)

    def of_candidate(self, name: str, candidate: Candidate) -> TtirFacts | None:
        """Facts of this assignment's IR; before it is traced, those in the problem's record."""
        grid = self.grids.get(candidate, self.problem.grid)
        facts = self.texts.facts(name, self.problem.arguments, grid) if name in self.texts else None
        if facts is None:
            units, by_name = self._recorded_facts
            facts = units.get((name, grid)) or by_name.get(name)
        return facts

    @cached_property
    def _recorded_facts(self) -> tuple[Mapping[tuple[str, Grid], TtirFacts], Mapping[str, TtirFacts]]:
        """The facts of an earlier process's IR: by assignment and launch grid, and by assignment alone."""
        units = facts_by_unit(self.problem)
        return units, {name: facts for (name, _), facts in units.items()}


class LazyTraces:
    """TTIR texts of one task, gathered lazily. Warps and stages do not change TTIR."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        trace: Tracer | BackgroundTracer | None,
        read: FactReader | None = None,
    ) -> None:
        """Without `trace` there is no IR; without `read`, no meta-parameter is found to be inert."""
        self._facts = read if isinstance(read, LaunchFacts) else None
        self.texts = TracedTexts() if self._facts is None else self._facts.texts
        self.candidates = CandidateList.of(candidates)
        self._trace, self._reader = trace, read
        self._requests: set[int] = set()
        """Assignments, as `CandidateList.assignments` numbers them."""
        self._parse_count = 0
        """Number of texts that were parsed ahead, from the first on."""

    def facts(self, row: int) -> TtirFacts | None:
        """Facts of the IR of the candidate in this row; before it is traced, those in the problem's record.

        None where neither can be read.
        """
        names, keys = self.candidates.assignments
        name, candidate = names[keys[row]], self.candidates[row]
        if self._facts is not None:
            return self._facts.of_candidate(name, candidate)
        if self._reader is None or name not in self.texts:
            return None
        return self._reader(candidate, self.texts[name])

    @property
    def outstanding(self) -> int:
        """Assignments that are being traced in the background."""
        return self._trace.outstanding if isinstance(self._trace, BackgroundTracer) else 0

    def start_initial(self) -> bool:
        """Start the first traces in the background, if the tracer can; whether any are running.

        `trace_initial` waits for them. In a large list, the neighbours that show which meta-parameters are inert are
        traced as well.
        """
        if not isinstance(self._trace, BackgroundTracer):
            return False
        assignments = list(self._initial_assignments)
        if len(self.candidates.assignments[0]) > FULL_TRACE_LIMIT and self._reader is not None:
            assignments = list(dict.fromkeys([*assignments, *self._probe_assignments]))
        return self._start(assignments)

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Take in texts from the background, waiting `timeout_s` for the first; True if there were any."""
        if not isinstance(self._trace, BackgroundTracer):
            return False
        texts = self._trace.poll(timeout_s)
        self.texts.merge(texts)
        return bool(texts)

    def finish(self) -> None:
        """Wait for all traces in the background."""
        while self.outstanding:
            self.poll(_POLL_S)

    def parse_ahead(self) -> None:
        """Parse some texts while there is nothing else to do, so that another shape of the kernel finds them parsed.

        Child processes parse as well, but return facts alone. Longer texts are theirs, for each shape anew.
        """
        end = time.perf_counter() + _PARSE_S
        if self.texts.characters > READ_HERE_CHARACTERS:
            return
        for name in list(self.texts)[self._parse_count :]:
            if time.perf_counter() >= end:
                return
            self._parse_count += 1
            with contextlib.suppress(Exception):  # a reader of its facts gets the error
                # The longest computation on a text that does not depend on the arguments.
                _ = cached_module(self.texts[name]).live_bytes

    def close(self) -> None:
        """Cancel the traces in the background."""
        if isinstance(self._trace, BackgroundTracer):
            self._trace.close()

    def trace_initial(self, *, everything: bool = False) -> None:
        """The first traces: every assignment of a small list, or a sample that covers a large one."""
        if self._trace is None:
            return
        count = len(self.candidates.assignments[0])
        self._trace_assignments(range(count) if everything else self._initial_assignments)
        if count > FULL_TRACE_LIMIT and not everything and self._reader is not None:
            self._find_inert_parameters()

    def trace_best(self, order: npt.NDArray[np.intp]) -> bool:
        """Trace the best-ranked candidates not traced yet; True if there are new texts."""
        before = len(self.texts)
        self._trace_assignments(self._best_untraced(order))
        return len(self.texts) > before

    def _best_untraced(self, order: npt.NDArray[np.intp]) -> list[int]:
        names, keys = self.candidates.assignments
        if self._trace is None or len(self._requests) >= len(names):
            return []
        traced = [i for i in self._requests if names[i] in self.texts]
        is_untraced = ~np.isin(self._fact_classes, self._fact_classes[traced])
        is_untraced[list(self._requests)] = False
        ranking = keys[order]
        ranking = ranking[is_untraced[ranking]]
        best = np.sort(np.unique(self._fact_classes[ranking], return_index=True)[1])
        assignments: list[int] = ranking[best][:TRACES_PER_ROUND].tolist()
        return assignments

    def _find_inert_parameters(self) -> None:
        """Find the inert meta-parameters. The rest of the space is traced whole if it is small."""
        columns = trace_parameters(self.candidates)
        self._trace_assignments(self._probe_assignments)
        by_row = {row: facts for i in self._requests if (facts := self.facts(row := self._first_rows[i]))}
        inert = find_inert(columns, np.array(list(by_row), dtype=np.intp), list(by_row.values()))
        if not inert:
            return
        self._fact_classes = equivalence_classes(columns, np.array(self._first_rows, dtype=np.intp), inert)
        first = np.unique(self._fact_classes, return_index=True)[1]
        if len(first) <= DISTINCT_TRACE_LIMIT:
            classes = set(self._fact_classes[list(self._requests)].tolist())
            self._trace_assignments([i for i in first.tolist() if int(self._fact_classes[i]) not in classes])

    def _neighbours(self, base: int) -> list[int]:
        """Two assignments for each meta-parameter that differ from this one in it alone, if there are any."""
        columns, keys = trace_parameters(self.candidates), self.candidates.assignments[1]
        same = {name: c.codes == c.codes[self._first_rows[base]] for name, c in columns.items()}
        neighbours: dict[int, None] = {}
        for name in columns:
            agreements = [agrees for key, agrees in same.items() if key != name]
            rows = np.flatnonzero(np.logical_and.reduce([~same[name], *agreements]))
            neighbours |= dict.fromkeys(keys[rows[[0, -1]]].tolist() if len(rows) else ())
        return list(neighbours)

    @cached_property
    def _probe_assignments(self) -> list[int]:
        """Return neighbours of the first few assignments, which show the meta-parameters that are inert."""
        bases = self._initial_assignments[:PROBED_ASSIGNMENTS]
        return list(dict.fromkeys(i for base in bases for i in self._neighbours(base)))

    @cached_property
    def _initial_assignments(self) -> Sequence[int]:
        count = len(self.candidates.assignments[0])
        return (
            range(count)
            if count <= FULL_TRACE_LIMIT
            else self._farthest_assignments(range(count), SPREAD_TRACES)
        )

    @cached_property
    def _fact_classes(self) -> Codes:
        """Return a number per assignment, the same for those that are known to have the same facts."""
        return np.arange(len(self.candidates.assignments[0]))

    def _farthest_assignments(self, assignments: Sequence[int], count: int) -> list[int]:
        sample = farthest_point_sample(self._examples(assignments), count)
        keys = self.candidates.assignments[1]
        return [int(keys[self.candidates.row_of[c]]) for c in sample]

    def _examples(self, assignments: Sequence[int]) -> list[Candidate]:
        """The first candidate of each of these assignments."""
        return [self.candidates[self._first_rows[i]] for i in assignments]

    @cached_property
    def _first_rows(self) -> list[int]:
        """Row of the first candidate of every assignment."""
        rows: list[int] = np.unique(self.candidates.assignments[1], return_index=True)[1].tolist()
        return rows

    def _trace_assignments(self, assignments: Sequence[int]) -> None:
        fresh = [i for i in assignments if i not in self._requests]
        if self._trace is None or not (fresh or self.outstanding):
            return
        with span("trace", assignments=len(fresh) or self.outstanding):
            self.finish()
            if fresh:
                self.texts.merge(self._trace(self._units_of(fresh)))
        self._requests.update(fresh)

    def _start(self, assignments: Sequence[int]) -> bool:
        fresh = [i for i in assignments if i not in self._requests]
        if isinstance(self._trace, BackgroundTracer) and fresh:
            self._trace.start(self._units_of(fresh))
            self._requests.update(fresh)
            if not self.outstanding:  # the tracer knew all texts, and nothing else would take them in
                self.poll()
        return self.outstanding > 0

    def _units_of(self, assignments: Sequence[int]) -> list[Candidate]:
        """A candidate of each launch grid that these assignments have, as far as grids are known here."""
        if self._facts is None:
            return self._examples(assignments)
        units = self.candidates.units(self._facts.grids, self._facts.problem.grid)
        keys = self.candidates.assignments[1]
        numbers = set(assignments)
        return [self.candidates[row] for row in units.first.tolist() if int(keys[row]) in numbers]


def farthest_point_sample(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """`count` candidates that cover the space, or all of fewer: farthest-point sampling from the middle outwards.

    Those that differ in warps and stages alone lie at one point: one of them is taken, and others once no new point
    is left.
    """
    points = ConfigEncoder.of(candidates, meta_only=True)(candidates)
    middle = int(np.argmin(((points - fast_median(points, axis=0)) ** 2).sum(axis=1)))
    rows = [middle]
    nearest = ((points - points[middle]) ** 2).sum(axis=1)
    nearest[middle] = -1.0  # below every distance, so that none is taken twice
    while len(rows) < min(count, len(candidates)):
        far = int(np.argmax(nearest))
        rows.append(far)
        nearest = np.minimum(nearest, ((points - points[far]) ** 2).sum(axis=1))
        nearest[far] = -1.0
    return [candidates[i] for i in rows]
