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
_LEAST_COMPILATIONS = 2
_USUAL_RATIO, _USUAL_EXCESS_S = 3.0, 0.5
"""Multiple of the median compilation, and seconds beyond it, that do not yet show a slow candidate. In recorded
lists of libraries, candidates that compiled 2 to 2.5 times as long as the earlier half were faster than all others as
often as those that took less (4 %); of those at 2.5 to 3.2 times 1 % were, of those beyond none. Those that have
compiled so far are the quickest, so that a multiple of their median is reached early."""
_PENALTY = 1.6
"""log2 of run time for each doubling beyond these limits: candidates at 3.2 to 4.5 times, and beyond, were 2.3
and 7 times as slow as the best of the others in the median."""
SPILLED, _MANY_SPILLS, _SPILL_LATE = 16, 48, 1.5
"""Registers that a thread spills from which on fewer warps are expected to lose: a program's tiles are shared out among
its threads, so that with half of the warps each has twice as much to hold. No such config of 226 recorded ones was
within 2 % of the best of its list; of 134 where fewer spill, three of one kernel were, and compiled hardly longer.
These are expected to lose once they have compiled so many times as long."""
_SPILL_SLOWDOWN = 3.0
"""log2 of run time: in the median those configs took eight times as long as the best."""
_POLL_S = 0.01
"""Seconds between two looks at the compilations, while waiting for traces."""
_MOST_GUESSED = 256
"""Candidates up to which forecasting them once more costs nothing while they are traced."""
_MOST_UNTRACED = 6
"""Candidates up to which nearly all are measured anyway. To trace one takes as long as a quarter of its compilation."""


def is_traced_in_vain(candidates: CandidateList, workers: int) -> bool:
    """Whether tracing a list takes longer than its facts save: a short one, on a single worker."""
    texts = len(candidates.assignments[0])
    return workers == 1 and len(candidates) <= _MOST_UNTRACED and len(candidates) < 2 * texts


class FirstCompilations:
    """Compiles the first candidates of one task; none under a limit of measurements: the policy chooses each."""

    def __init__(
        self, traces: LazyTraces, guess: Callable[[], Forecasts], policy: Policy, settings: Settings
    ) -> None:
        """`guess` forecasts without IR."""
        self._traces, self._guess, self._candidates = traces, guess, traces.candidates
        self._is_free = settings.budget.measurements is None
        self._is_exhaustive = isinstance(policy, Exhaustive)
        self._by_time = isinstance(policy, WallTime)
        self.begun: list[Candidate] = []
        """Running compilations, in the order of request; or an earlier decision's binaries, best guess first."""
        self.are_all_measured = False
        """Whether all are to be measured, and none to be traced or forecast."""

    def begin(self, measurer: Measurer) -> None:
        """Compile the candidates of `at_once`; none where the binaries of an earlier decision may be enough."""
        by_time = self._is_free and self._by_time
        self.are_all_measured = by_time and is_traced_in_vain(self._candidates, measurer.workers)
        if self.are_all_measured:
            self._compile(measurer, list(self._candidates))
        elif not measurer.ready():
            self._compile(measurer, self.at_once(measurer.workers))

    def begin_guessed(self, measurer: Measurer) -> None:
        """Compile the candidates of `guessed`, or list the best binaries of an earlier decision.

        They are timed while waiting for traces.
        """
        if (ready := measurer.ready()) and not self.begun:
            if self._is_free and self._by_time and self._traces.outstanding:
                self.begun += [c for c in self._best_guesses() if c in ready]
            return
        self._compile(measurer, self.guessed(measurer.workers))

    def compiled_early(self, measurer: Measurer) -> Iterator[Candidate]:
        """Yield each candidate of `begun` that compiles before the first traces are complete.

        They can be timed meanwhile: the device is idle, and another process traces. Where nothing is traced, yields
        all of `begun`, compiled or not.
        """
        if self.are_all_measured:
            yield from self.begun
            return
        traces, queue = self._traces, dict.fromkeys(self.begun)
        if not (self._by_time and queue and measurer.quiet and traces.outstanding):
            return
        with span("trace", assignments=traces.outstanding):
            while queue and traces.outstanding:
                ready = measurer.ready()
                if (first := next((c for c in queue if c in ready), None)) is not None:
                    del queue[first]
                    yield first
                try:
                    traces.poll(_POLL_S if first is None else 0.0)
                except Exception:
                    return  # a failure repeats in the first forecast, which handles it

    def _compile(self, measurer: Measurer, candidates: Sequence[Candidate]) -> None:
        if candidates:
            self.begun += candidates
            measurer.prefetch(candidates)

    def at_once(self, workers: int) -> Sequence[Candidate]:
        """All candidates, if they fit the workers once or twice, before tracing: of a longer list few are measured."""
        fits = self._by_time and len(self._candidates) <= 2 * workers
        if not (self._is_free and (fits or self._is_exhaustive)):
            return ()
        # Stages alone often change nothing, as the IR shows later: one of each such group comes first.
        columns = [column for name, column in self._candidates.columns.items() if name != "num_stages"]
        first, _ = group_rows(columns, len(self._candidates))
        order = np.argsort(~np.isin(np.arange(len(self._candidates)), first), kind="stable")
        return [self._candidates[row] for row in order.tolist()]

    def guessed(self, workers: int) -> Sequence[Candidate]:
        """Return the best of a longer list by forecasts without IR, one for each worker while the list is traced.

        In 19 recorded lists of 36 to 48, plans with IR ask for 72 % of the sixteen, and every sixteen holds a
        config within 2 % of the best. Plans replace the others. A single worker waits: it would take the core that
        traces.
        """
        if not (self._is_free and self._by_time and 2 * workers < len(self._candidates) and workers > 1):
            return ()
        return self._best_guesses()[:workers]

    def _best_guesses(self) -> Sequence[Candidate]:
        """All that may launch, by forecasts without IR; none of a list that takes long to forecast."""
        if len(self._candidates) > _MOST_GUESSED:
            return ()
        with contextlib.suppress(Exception), single_threaded_blas():  # the first forecast handles failures
            guess = self._guess()
            return [self._candidates[row] for row in guess.order().tolist() if guess.p_fail[row] < REFUSED]
        return ()


class ExpectedCompilations(NamedTuple):
    """Forecasts of the compilations of a task's candidates."""

    remaining: Array
    """Seconds until each is compiled, if it starts or goes on now; [n], 0 where it is."""
    penalties: Array
    """log2 by which each should run slower than forecast, as it compiles far longer than others; [n].

    A kernel that unrolls or spills without bounds compiles long and runs slowly, also where its compilation was given
    up. All are 0 before `_LEAST_COMPILATIONS` have ended, or those of all programs but one.
    """


class CompileTimes:
    """Expected seconds per candidate, as of the compilations so far."""

    def __init__(
        self,
        candidates: CandidateList,
        traces: LazyTraces,
        formula: CompileSeconds | None = None,
        stage_doublings: float = 0.0,
    ) -> None:
        """`stage_doublings` is the result of `features.compile_seconds.stage_doublings`."""
        self._candidates, self._traces, self._doublings = candidates, traces, stage_doublings
        self._formula = formula or shipped_compile_seconds()
        self._texts = -1
        self.longest: dict[Candidate, float] = {}
        """Longest seconds that a candidate has compiled without an end, also those that were given up."""
        self._log2_seconds = np.full(len(candidates), math.log2(UNKNOWN_S))

    def expected(
        self,
        seconds: Mapping[Candidate, float],
        compiling: Mapping[Candidate, float],
        ready: Collection[Candidate],
        programs: int | None = None,
    ) -> ExpectedCompilations:
        """Return the forecasts of this moment.

        `seconds` are those of the compilations that have ended, `compiling` those so far of the running ones. A
        compilation that was given up starts anew, and takes longer than it ran before. `programs` is the number of
        different programs that the candidates compile to, as far as it is known.
        """
        ages = self._ages(seconds, compiling, ready)
        return ExpectedCompilations(
            self._remaining(seconds, compiling, ready, ages),
            self._penalties(seconds, ages, len(self._candidates) if programs is None else programs),
        )

    def forecast(self, row: int) -> float:
        """log2(seconds) of a candidate by the formula alone; 0 without its IR."""
        return float(self._formula_seconds()[row]) if self._traces.facts(row) is not None else 0.0

    def _remaining(
        self,
        seconds: Mapping[Candidate, float],
        compiling: Mapping[Candidate, float],
        ready: Collection[Candidate],
        ages: Mapping[Candidate, float],
    ) -> Array:
        logs, row_of = self._formula_seconds(), self._candidates.row_of
        observations = [(row_of[c], math.log2(s)) for c, s in seconds.items() if c in row_of and s > 0]
        if not observations:
            # All running ones may be late: the others of this kernel would be no quicker.
            overdue = ((row_of[c], math.log2(s)) for c, s in ages.items() if s > 0)
            observations = [(row, log) for row, log in overdue if log > logs[row]]
        level = self._formula.level([log - logs[row] for row, log in observations])
        sd = math.hypot(self._formula.config_sd, 0.0 if observations else self._formula.kernel_sd)
        remaining = np.exp2(logs + level + sd**2 * math.log(2) / 2)
        for c, age in ages.items():
            more_s = remaining_seconds(float(logs[row_of[c]]) + level, sd, age)
            remaining[row_of[c]] = more_s + age - compiling.get(c, 0.0)
        remaining[[row_of[c] for c in (*seconds, *ready) if c in row_of]] = 0.0
        return remaining

    def _penalties(
        self, seconds: Mapping[Candidate, float], ages: Mapping[Candidate, float], programs: int
    ) -> Array:
        penalties = np.zeros(len(self._candidates))
        durations = [s for s in seconds.values() if s > 0]
        if len(durations) < max(1, min(_LEAST_COMPILATIONS, programs - 1)):
            return penalties
        median = statistics.median(durations)
        usual = max(_USUAL_RATIO * median, median + _USUAL_EXCESS_S)
        for c, age in ages.items():
            if age > usual:
                penalties[self._candidates.row_of[c]] = _PENALTY * math.log2(age / usual)
        return penalties

    def _ages(
        self,
        seconds: Mapping[Candidate, float],
        compiling: Mapping[Candidate, float],
        ready: Collection[Candidate],
    ) -> dict[Candidate, float]:
        """Seconds that each candidate without a binary has compiled at the longest.

        Candidates that were given up are among them: without their seconds they would look as good as before they
        began, and two candidates could take a worker from each other for ever.
        """
        for c, age in compiling.items():
            if c in self._candidates.row_of:
                self.longest[c] = max(age, self.longest.get(c, 0.0))
        return {c: s for c, s in self.longest.items() if c not in seconds and c not in ready}

    def _formula_seconds(self) -> Array:
        """Medians of log2(seconds) by the formula; those without IR have the mean of the others."""
        if self._texts == len(self._traces.texts):
            return self._log2_seconds
        features: dict[int, list[float]] = {}
        deeper: list[float] = []
        for row, candidate in enumerate(self._candidates):
            if (facts := self._traces.facts(row)) is not None:
                config = candidate.config
                features[row] = compile_features(facts, config.num_warps, config.num_stages)
                deeper.append(deep_log2_seconds(facts, config.num_stages, self._doublings))
        if features:
            logs = self._formula.log2_seconds(list(features.values())) + deeper
            self._log2_seconds = np.full(len(self._candidates), float(logs.mean()))
            self._log2_seconds[list(features)] = logs
        self._texts = len(self._traces.texts)
        return self._log2_seconds


class DistinctPrograms:
    """Numbers of programs per candidate, as of the IR so far."""

    def __init__(self, problem: Problem, candidates: CandidateList, traces: LazyTraces) -> None:
        self._candidates, self._traces = candidates, traces
        self._applies = problem.kernel.language == "triton" and problem.device.backend in ("cuda", "hip")
        self._device = device_spec(problem.device, dict(problem.toolchain).get("triton", ""))
        self._texts = -1
        self._numbers: Codes | None = None

    def numbers(self) -> Codes | None:
        """As `program_numbers`; None where no equality is known."""
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
    candidates: CandidateList, measurements: Iterable[Measurement], ages: Mapping[Candidate, float]
) -> Array:
    """log2 by which each candidate should run slower than forecast, as a measured one with more warps spills: [n].

    The two agree in all else but the number of stages. `extra["spills"]` of a measurement counts the spilled registers
    of a thread; `ages` are the seconds that candidates have compiled so far.
    """
    slowdowns = np.zeros(len(candidates))
    successes = [m for m in measurements if m.ok and m.candidate in candidates.row_of]
    spillers = [m for m in successes if _spills(m) >= SPILLED]
    if not spillers:
        return slowdowns
    columns = candidates.columns
    alike = [c for name, c in columns.items() if name not in ("num_warps", "num_stages")]
    group = group_rows(alike, len(candidates))[1]
    warps = np.array([c.config.num_warps for c in candidates])
    seconds = np.array([ages.get(c, 0.0) for c in candidates])
    for m in spillers:
        row, late_s = candidates.row_of[m.candidate], _SPILL_LATE * (m.compile_s or 0.0)
        late = seconds >= (0.0 if _spills(m) >= _MANY_SPILLS else late_s)
        slowdowns[late & (group == group[row]) & (warps < warps[row])] = _SPILL_SLOWDOWN
    return slowdowns


def _spills(m: Measurement) -> int:
    spills = m.extra.get("spills")
    return spills if isinstance(spills, int) else 0
