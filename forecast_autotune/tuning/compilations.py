"""The compilations of a task's candidates: which come first, when each ends, and which make the same program."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from forecast_autotune.features.candidate_list import CandidateList, Codes, group_rows
from forecast_autotune.features.compile_seconds import (
    CompileSeconds,
    compile_features,
    deep_log2_seconds,
    remaining_seconds,
    shipped_compile_seconds,
)
from forecast_autotune.features.devices import device_spec
from forecast_autotune.features.inert_parameters import program_numbers
from forecast_autotune.numerics import fast_unique, single_threaded_blas
from forecast_autotune.policy import REFUSED, Exhaustive, Policy, WallTime
from forecast_autotune.records import Candidate, Measurement, Problem
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.protocol import Array, Forecasts
from forecast_autotune.telemetry.spans import span
from forecast_autotune.tuning.measurer import Measurer
from forecast_autotune.tuning.tracing import LazyTraces

UNKNOWN_S = 0.6
"""Median seconds of a candidate whose IR is not known, before anything has compiled."""
_LEAST_COMPILED = 2
_USUAL, _USUAL_S = 3.0, 0.5
"""Multiple of the median compilation, and seconds beyond it, that say nothing of a candidate's speed yet. In recorded
lists of libraries, candidates that compiled 2 to 2.5 times as long as the earlier half were faster than all others as
often as those that took less (4 %); of those at 2.5 to 3.2 times 1 % were, of those beyond none. Those that have
compiled so far are the quickest, so that a multiple of their median is reached early."""
_PENALTY = 1.6
"""log2 of run time for each doubling beyond that: those lists' candidates at 3.2 to 4.5 times, and beyond, were 2.3
and 7 times as slow as the best of the others in the median."""
SPILLED, _SPILLED_MUCH, _SPILL_LATE = 16, 48, 1.5
"""Registers that a thread spills from which on fewer warps are expected to lose: a program's tiles are shared out among
its threads, so that with half of the warps each has twice as much to hold. No such config of 226 recorded ones was
within 2 % of the best of its list; of 134 where fewer spill, three of one kernel were, and compiled hardly longer.
These are expected to lose once they have compiled so many times as long."""
_SPILL_SLOWDOWN = 3.0
"""log2 of run time: in the median those configs took eight times as long as the best."""
_LOOK_S = 0.01
"""Seconds between two looks at what has compiled, while traces are waited for."""
_MOST_GUESSED = 256
"""Candidates up to which forecasting them once more costs nothing while they are traced."""
_MOST_UNTRACED = 6
"""Candidates up to which nearly all are measured anyway. To trace one takes as long as a quarter of its compilation."""


def is_traced_in_vain(candidates: CandidateList, workers: int) -> bool:
    """Whether to trace a list takes longer than what is known then saves: a short one, on a single worker."""
    texts = len(candidates.assignments[0])
    return workers == 1 and len(candidates) <= _MOST_UNTRACED and len(candidates) < 2 * texts


class FirstCompilations:
    """Compiles the first candidates of one task; none where measurements are limited: each is worth choosing."""

    def __init__(
        self, traces: LazyTraces, guess: Callable[[], Forecasts], policy: Policy, settings: Settings
    ) -> None:
        """`guess` forecasts without IR."""
        self._traces, self._guess, self._candidates = traces, guess, traces.candidates
        self._is_free = settings.budget.measurements is None
        self._is_exhaustive = isinstance(policy, Exhaustive)
        self._by_time = isinstance(policy, WallTime)
        self.begun: list[Candidate] = []
        """Running compilations, in the order asked for; or, of an earlier decision's binaries, what seems best."""
        self.are_all_measured = False
        """Whether all are to be measured, and none to be traced or forecast."""

    def begin(self, measurer: Measurer) -> None:
        """Compile what `at_once` names; nothing where binaries of an earlier decision may be all that it takes."""
        by_time = self._is_free and self._by_time
        self.are_all_measured = by_time and is_traced_in_vain(self._candidates, measurer.workers)
        if self.are_all_measured:
            self._compile(measurer, list(self._candidates))
        elif not measurer.ready():
            self._compile(measurer, self.at_once(measurer.workers))

    def begin_guessed(self, measurer: Measurer) -> None:
        """Compile what `guessed` names, or take the best of an earlier decision's binaries where there are some.

        These are for the time in which traces are waited for.
        """
        if (ready := measurer.ready()) and not self.begun:
            if self._is_free and self._by_time and self._traces.outstanding:
                self.begun += [c for c in self._best_guesses() if c in ready]
            return
        self._compile(measurer, self.guessed(measurer.workers))

    def compiled_early(self, measurer: Measurer) -> Iterator[Candidate]:
        """Each candidate of `begun` that has compiled while the first traces are still to come; ends with those.

        To be timed meanwhile: nobody else needs the device, and another process traces. Where nothing is traced,
        all of it, compiled or not.
        """
        if self.are_all_measured:
            yield from self.begun
            return
        traces, left = self._traces, dict.fromkeys(self.begun)
        if not (self._by_time and left and measurer.quiet and traces.outstanding):
            return
        with span("trace", assignments=traces.outstanding):
            while left and traces.outstanding:
                compiled = measurer.ready()
                if (first := next((c for c in left if c in compiled), None)) is not None:
                    del left[first]
                    yield first
                try:
                    traces.poll(_LOOK_S if first is None else 0.0)
                except Exception:
                    return  # it fails again where the traces are needed, and is dealt with there

    def _compile(self, measurer: Measurer, candidates: Sequence[Candidate]) -> None:
        if candidates:
            self.begun += candidates
            measurer.prefetch(candidates)

    def at_once(self, workers: int) -> Sequence[Candidate]:
        """A list that fits the workers, once or twice, before anything is traced: few of a longer one are wanted."""
        fits = self._by_time and len(self._candidates) <= 2 * workers
        if not (self._is_free and (fits or self._is_exhaustive)):
            return ()
        # Stages alone often change nothing, which is seen once there is IR: one of each comes first.
        columns = [column for name, column in self._candidates.columns.items() if name != "num_stages"]
        first, _ = group_rows(columns, len(self._candidates))
        order = np.argsort(~np.isin(np.arange(len(self._candidates)), first), kind="stable")
        return [self._candidates[row] for row in order.tolist()]

    def guessed(self, workers: int) -> Sequence[Candidate]:
        """Return the best of a longer list without its IR, one for each worker while that is traced.

        In 19 recorded lists of 36 to 48, 72 % of sixteen are wanted once there is IR, and all sixteens hold a
        config within 2 % of the best. Workers that turn out to have the wrong ones are given others. A single one
        waits: it would take the core that traces.
        """
        if not (self._is_free and self._by_time and 2 * workers < len(self._candidates) and workers > 1):
            return ()
        return self._best_guesses()[:workers]

    def _best_guesses(self) -> Sequence[Candidate]:
        """All that may launch, by forecasts without IR; none of a list that takes long to forecast."""
        if len(self._candidates) > _MOST_GUESSED:
            return ()
        with contextlib.suppress(Exception), single_threaded_blas():  # it fails again where it is dealt with
            guess = self._guess()
            return [self._candidates[row] for row in guess.order().tolist() if guess.p_fail[row] < REFUSED]
        return ()


class ExpectedCompilations(NamedTuple):
    """Forecasts of the compilations of a task's candidates."""

    remaining: Array
    """Seconds until each is compiled, if it starts or goes on now; [n], 0 where it is."""
    penalties: Array
    """log2 by which each should run slower than forecast, as it compiles far longer than others; [n].

    A kernel that unrolls or spills without bounds compiles long and runs slowly, also where it was given up. None is
    expected to before `_LEAST_COMPILED` have compiled, or all programs but one.
    """


class CompileTimes:
    """Expected seconds per candidate; asked again whenever something has compiled."""

    def __init__(
        self,
        candidates: CandidateList,
        traces: LazyTraces,
        formula: CompileSeconds | None = None,
        stage_doublings: float = 0.0,
    ) -> None:
        """`stage_doublings` as the function of that name has it."""
        self._candidates, self._traces, self._doublings = candidates, traces, stage_doublings
        self._formula = formula or shipped_compile_seconds()
        self._texts = -1
        self.longest: dict[Candidate, float] = {}
        """Seconds that candidates have compiled without an end, also those that were given up."""
        self._log2_seconds = np.full(len(candidates), math.log2(UNKNOWN_S))

    def expected(
        self,
        seconds: Mapping[Candidate, float],
        compiling: Mapping[Candidate, float],
        ready: Collection[Candidate],
        programs: int | None = None,
    ) -> ExpectedCompilations:
        """Return the forecasts of this moment.

        `seconds` is what those took that have compiled, `compiling` how long others have been at it. One that was
        given up starts anew, and takes longer than it had been given. `programs` is how many different ones the
        candidates compile to, as far as that is known.
        """
        lasted = self._lasted(seconds, compiling, ready)
        return ExpectedCompilations(
            self._remaining(seconds, compiling, ready, lasted),
            self._penalties(seconds, lasted, len(self._candidates) if programs is None else programs),
        )

    def forecast(self, row: int) -> float:
        """log2(seconds) of a candidate by the formula, whatever has compiled by now; 0 without its IR."""
        return float(self._formula_seconds()[row]) if self._traces.facts(row) is not None else 0.0

    def _remaining(
        self,
        seconds: Mapping[Candidate, float],
        compiling: Mapping[Candidate, float],
        ready: Collection[Candidate],
        lasted: Mapping[Candidate, float],
    ) -> Array:
        logs, row_of = self._formula_seconds(), self._candidates.row_of
        seen = [(row_of[c], math.log2(s)) for c, s in seconds.items() if c in row_of and s > 0]
        if not seen:
            # All may be late: the others of this kernel would be no quicker.
            overdue = ((row_of[c], math.log2(s)) for c, s in lasted.items() if s > 0)
            seen = [(row, log) for row, log in overdue if log > logs[row]]
        level = self._formula.level([log - logs[row] for row, log in seen])
        sd = math.hypot(self._formula.config_sd, 0.0 if seen else self._formula.kernel_sd)
        remaining = np.exp2(logs + level + sd**2 * math.log(2) / 2)
        for c, least in lasted.items():
            rest = remaining_seconds(float(logs[row_of[c]]) + level, sd, least)
            remaining[row_of[c]] = rest + least - compiling.get(c, 0.0)
        remaining[[row_of[c] for c in (*seconds, *ready) if c in row_of]] = 0.0
        return remaining

    def _penalties(
        self, seconds: Mapping[Candidate, float], lasted: Mapping[Candidate, float], programs: int
    ) -> Array:
        penalties = np.zeros(len(self._candidates))
        took = [s for s in seconds.values() if s > 0]
        if len(took) < max(1, min(_LEAST_COMPILED, programs - 1)):
            return penalties
        half = statistics.median(took)
        usual = max(_USUAL * half, half + _USUAL_S)
        for c, least in lasted.items():
            if least > usual:
                penalties[self._candidates.row_of[c]] = _PENALTY * math.log2(least / usual)
        return penalties

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
                self.longest[c] = max(elapsed, self.longest.get(c, 0.0))
        return {c: s for c, s in self.longest.items() if c not in seconds and c not in ready}

    def _formula_seconds(self) -> Array:
        """Medians of log2(seconds) by the formula; those without IR have the mean of the others."""
        if self._texts == len(self._traces.texts):
            return self._log2_seconds
        known: dict[int, list[float]] = {}
        deeper: list[float] = []
        for row, candidate in enumerate(self._candidates):
            if (facts := self._traces.facts(row)) is not None:
                config = candidate.config
                known[row] = compile_features(facts, config.num_warps, config.num_stages)
                deeper.append(deep_log2_seconds(facts, config.num_stages, self._doublings))
        if known:
            logs = self._formula.log2_seconds(list(known.values())) + deeper
            self._log2_seconds = np.full(len(self._candidates), float(logs.mean()))
            self._log2_seconds[list(known)] = logs
        self._texts = len(self._traces.texts)
        return self._log2_seconds


class DistinctPrograms:
    """Numbers of programs per candidate; asked again whenever IR has come in."""

    def __init__(self, problem: Problem, candidates: CandidateList, traces: LazyTraces) -> None:
        self._candidates, self._traces = candidates, traces
        self._applies = problem.kernel.language == "triton" and problem.device.backend in ("cuda", "hip")
        self._device = device_spec(problem.device, dict(problem.toolchain).get("triton", ""))
        self._texts = -1
        self._numbers: Codes | None = None

    def numbers(self) -> Codes | None:
        """As `program_numbers`; None where nothing is known of what is equal."""
        if self._applies and self._texts != len(self._traces.texts):
            self._texts = len(self._traces.texts)
            self._numbers = program_numbers(self._candidates, self._traces.facts, self._device)
        return self._numbers

    def count(self) -> int:
        """How many different programs the candidates compile to, as far as is known."""
        numbers = self.numbers()
        return len(self._candidates) if numbers is None else len(fast_unique(numbers))

    def count_equal(self, labels: Collection[Candidate]) -> int:
        """How many candidates without a label share their program with one that has one."""
        if (numbers := self.numbers()) is None:
            return 0
        labelled = self._candidates.mask_of(labels)
        return int(np.isin(numbers, numbers[labelled]).sum() - labelled.sum())


def spill_slowdowns(
    candidates: CandidateList, measurements: Iterable[Measurement], lasted: Mapping[Candidate, float]
) -> Array:
    """log2 by which each candidate should run slower than forecast, as a measured one with more warps spills: [n].

    The two agree in all else but the number of stages. `measurements` say what spilled in `extra["spills"]`, in
    registers of a thread, and `lasted` for how many seconds candidates have compiled.
    """
    slowdowns = np.zeros(len(candidates))
    ran = [m for m in measurements if m.ok and m.candidate in candidates.row_of]
    spilled = [m for m in ran if _spills(m) >= SPILLED]
    if not spilled:
        return slowdowns
    columns = candidates.columns
    alike = [c for name, c in columns.items() if name not in ("num_warps", "num_stages")]
    group = group_rows(alike, len(candidates))[1]
    warps = np.array([c.config.num_warps for c in candidates])
    seconds = np.array([lasted.get(c, 0.0) for c in candidates])
    for m in spilled:
        row, late_s = candidates.row_of[m.candidate], _SPILL_LATE * (m.compile_s or 0.0)
        late = seconds >= (0.0 if _spills(m) >= _SPILLED_MUCH else late_s)
        slowdowns[late & (group == group[row]) & (warps < warps[row])] = _SPILL_SLOWDOWN
    return slowdowns


def _spills(m: Measurement) -> int:
    spills = m.extra.get("spills")
    return spills if isinstance(spills, int) else 0
