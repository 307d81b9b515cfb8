"""When the candidates of one task will be compiled, from their IR and from what has compiled so far."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.features.compile_seconds import (
    CompileSeconds,
    compile_features,
    remaining_seconds,
    shipped_compile_seconds,
)
from forecast_autotune.records import Candidate
from forecast_autotune.surrogates.protocol import Array
from forecast_autotune.tuning.preparation.tracing import LazyTraces

UNKNOWN_S = 0.6
"""Median seconds of a candidate whose IR is not known, before anything has compiled."""
_LEAST_COMPILED = 2
_USUAL, _USUAL_S = 3.0, 0.5
"""Multiple of the median compilation, and seconds beyond it, that say nothing of a candidate's speed yet. Of recorded
lists of libraries, candidates that compiled 2 to 2.5 times as long as the earlier half were faster than all others as
often as those that took less (4 %); of those at 2.5 to 3.2 times 1 % were, of those beyond none. What has compiled so
far are the quickest, so that a multiple of their median is reached early."""
_PENALTY = 1.6
"""log2 of run time for each doubling beyond that: those lists' candidates at 3.2 to 4.5 times, and beyond, were 2.3
and 7 times as slow as the best of the others in the median."""


class ExpectedCompilations(NamedTuple):
    """What is expected of the compilations of a task's candidates."""

    remaining: Array
    """Seconds until each is compiled, if it starts or goes on now; [n], 0 where it is."""
    penalties: Array
    """log2 by which each should run slower than forecast, as it compiles far longer than others; [n].

    What has unrolled or spilled without bounds compiles long and runs slowly, also where it was given up. None is
    expected to before `_LEAST_COMPILED` have compiled, or all programs but one.
    """


class CompileTimes:
    """Expected seconds per candidate; asked again whenever something has compiled."""

    def __init__(
        self, candidates: CandidateList, traces: LazyTraces, formula: CompileSeconds | None = None
    ) -> None:
        self._candidates, self._traces = candidates, traces
        self._formula = formula or shipped_compile_seconds()
        self._texts = -1
        self._longest: dict[Candidate, float] = {}
        """Seconds that candidates have compiled without an end, also those that were given up."""
        self._said = np.full(len(candidates), math.log2(UNKNOWN_S))

    def expected(
        self,
        seconds: Mapping[Candidate, float],
        compiling: Mapping[Candidate, float],
        ready: Collection[Candidate],
        programs: int | None = None,
    ) -> ExpectedCompilations:
        """What is to be expected now.

        `seconds` is what those took that have compiled, `compiling` how long others have been at it. What was
        given up starts anew, and takes longer than it had been given. `programs` is how many different ones the
        candidates compile to, as far as that is known.
        """
        lasted = self._lasted(seconds, compiling, ready)
        return ExpectedCompilations(
            self._remaining(seconds, compiling, ready, lasted),
            self._penalties(seconds, lasted, len(self._candidates) if programs is None else programs),
        )

    def _remaining(
        self,
        seconds: Mapping[Candidate, float],
        compiling: Mapping[Candidate, float],
        ready: Collection[Candidate],
        lasted: Mapping[Candidate, float],
    ) -> Array:
        said, row_of = self._formula_seconds(), self._candidates.row_of
        seen = [(row_of[c], math.log2(s)) for c, s in seconds.items() if c in row_of and s > 0]
        if not seen:
            # All may be late: the others of this kernel would be no quicker.
            overdue = ((row_of[c], math.log2(s)) for c, s in lasted.items() if s > 0)
            seen = [(row, log) for row, log in overdue if log > said[row]]
        level = self._formula.level([log - said[row] for row, log in seen])
        sd = math.hypot(self._formula.config_sd, 0.0 if seen else self._formula.kernel_sd)
        found = np.exp2(said + level + sd**2 * math.log(2) / 2)
        for c, least in lasted.items():
            rest = remaining_seconds(float(said[row_of[c]]) + level, sd, least)
            found[row_of[c]] = rest + least - compiling.get(c, 0.0)
        found[[row_of[c] for c in (*seconds, *ready) if c in row_of]] = 0.0
        return found

    def _penalties(
        self, seconds: Mapping[Candidate, float], lasted: Mapping[Candidate, float], programs: int
    ) -> Array:
        found = np.zeros(len(self._candidates))
        took = [s for s in seconds.values() if s > 0]
        if len(took) < max(1, min(_LEAST_COMPILED, programs - 1)):
            return found
        half = statistics.median(took)
        usual = max(_USUAL * half, half + _USUAL_S)
        for c, least in lasted.items():
            if least > usual:
                found[self._candidates.row_of[c]] = _PENALTY * math.log2(least / usual)
        return found

    def _lasted(
        self,
        seconds: Mapping[Candidate, float],
        compiling: Mapping[Candidate, float],
        ready: Collection[Candidate],
    ) -> dict[Candidate, float]:
        """The longest that each candidate has compiled, of those that have not ended.

        Were it forgotten of what is given up, that would look as good as before it began: two candidates could
        take a worker from each other for ever.
        """
        for c, elapsed in compiling.items():
            if c in self._candidates.row_of:
                self._longest[c] = max(elapsed, self._longest.get(c, 0.0))
        return {c: s for c, s in self._longest.items() if c not in seconds and c not in ready}

    def _formula_seconds(self) -> Array:
        """Medians of log2(seconds) by the formula; those without IR have the mean of the others."""
        if self._texts == len(self._traces.texts):
            return self._said
        known: dict[int, list[float]] = {}
        for row, candidate in enumerate(self._candidates):
            if (facts := self._traces.facts(row)) is not None:
                config = candidate.config
                known[row] = compile_features(facts, config.num_warps, config.num_stages)
        if known:
            said = self._formula.log2_seconds(list(known.values()))
            self._said = np.full(len(self._candidates), float(said.mean()))
            self._said[list(known)] = said
        self._texts = len(self._traces.texts)
        return self._said
