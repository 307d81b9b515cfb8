"""What to compile, and then to time, before there is a forecast that a plan could rest on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from forecast_autotune.features.candidate_list import CandidateList, group_rows
from forecast_autotune.numerics import single_threaded_blas
from forecast_autotune.policy import REFUSED, Exhaustive, Policy, WallTime
from forecast_autotune.records import Candidate
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.protocol import Relative
from forecast_autotune.telemetry.spans import span
from forecast_autotune.tuning.forecaster import TaskForecaster
from forecast_autotune.tuning.measurer import Measurer

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
    """Of one task: nothing where measurements are limited, as then each is worth choosing."""

    def __init__(self, forecaster: TaskForecaster, policy: Policy, settings: Settings) -> None:
        self._forecaster, self._candidates = forecaster, forecaster.candidates
        self._is_free = settings.budget.measurements is None
        self._is_exhaustive = isinstance(policy, Exhaustive)
        self._by_time = isinstance(policy, WallTime)
        self.begun: list[Candidate] = []
        """What compiles by now, in the order asked for; or, of an earlier decision's binaries, what seems best."""
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

    def begin_guessed(self, measurer: Measurer, relatives: Sequence[Relative]) -> None:
        """Compile what `guessed` names, or take the best of an earlier decision's binaries where there are some.

        These are for the time in which traces are waited for.
        """
        if (ready := measurer.ready()) and not self.begun:
            if self._is_free and self._by_time and self._forecaster.traces.outstanding:
                self.begun += [c for c in self._best_guesses(relatives) if c in ready]
            return
        self._compile(measurer, self.guessed(measurer.workers, relatives))

    def compiled_early(self, measurer: Measurer) -> Iterator[Candidate]:
        """Of `begun`, each that has compiled while the first traces are still to come; ends with those.

        To be timed meanwhile: nobody else needs the device, and who traces is another process. Where nothing is traced,
        all of it, compiled or not.
        """
        if self.are_all_measured:
            yield from self.begun
            return
        traces, left = self._forecaster.traces, dict.fromkeys(self.begun)
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

    def guessed(self, workers: int, relatives: Sequence[Relative]) -> Sequence[Candidate]:
        """Of a longer list, what seems best without its IR, one for each worker while that is traced.

        Of 19 recorded lists of 36 to 48, 72 % of sixteen are wanted once there is IR, and all sixteens hold a
        config within 2 % of the best. Workers that turn out to have the wrong ones are given others. A single one
        waits: it would take the core that traces.
        """
        if not (self._is_free and self._by_time and 2 * workers < len(self._candidates) and workers > 1):
            return ()
        return self._best_guesses(relatives)[:workers]

    def _best_guesses(self, relatives: Sequence[Relative]) -> Sequence[Candidate]:
        """All that may launch, by forecasts without IR; none of a list that takes long to forecast."""
        if len(self._candidates) > _MOST_GUESSED:
            return ()
        with contextlib.suppress(Exception), single_threaded_blas():  # it fails again where it is dealt with
            guess = self._forecaster.forecast((), relatives, provisional=True)
            return [self._candidates[row] for row in guess.order().tolist() if guess.p_fail[row] < REFUSED]
        return ()
