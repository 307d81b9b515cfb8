"""One surrogate's forecasts of one task, from what is known when it is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.records import Measurement
from forecast_autotune.surrogates.protocol import FileBackedSurrogate, Forecasts, Query, Relative, Surrogate
from forecast_autotune.telemetry.spans import span
from forecast_autotune.tuning.failing_sources import expect_failing_sources
from forecast_autotune.tuning.preparation.tracing import LazyTraces, fact_reader
from forecast_autotune.tuning.task import TuningTask, validate_forecasts


class TaskForecaster:
    """Takes a task apart, once: from here on there are its problem, its candidates and forecasts of them."""

    def __init__(self, task: TuningTask, surrogate: Surrogate) -> None:
        self.problem = task.problem
        self.candidates = CandidateList.of(task.candidates)
        self.grids = task.grids
        """Launch grids that depend on the candidate."""
        self.traces = LazyTraces(self.candidates, task.trace, fact_reader(task.problem, task.grids))
        """The IR that queries hold; whoever wants forecasts decides how much of it there is."""
        self._surrogate, self._sources, self._advice = surrogate, task.sources, task.advice
        self._judgements = task.judgements

    def prepare(self) -> None:
        """Begin what a first forecast needs: tracing in the background, and the surrogate's files."""
        # Whatever fails here fails again where it is needed, and is dealt with there.
        with contextlib.suppress(Exception):
            self.traces.start_initial()
            if isinstance(self._surrogate, FileBackedSurrogate):
                self._surrogate.load()

    @property
    def name(self) -> str:
        """The surrogate's name."""
        return self._surrogate.name

    @property
    def label(self) -> str:
        """The surrogate's `name/version`."""
        return f"{self._surrogate.name}/{self._surrogate.version}"

    def forecast(
        self,
        measured: Sequence[Measurement],
        relatives: Sequence[Relative],
        *,
        among: CandidateList | None = None,
        provisional: bool = False,
        once: bool = False,
    ) -> Forecasts:
        """Forecasts of `among`, by default of all candidates; `provisional` and `once` as in `Query`.

        Raises whatever the surrogate raises, and `RecordError` for an answer that no decision can be built on.
        """
        candidates = self.candidates if among is None else among
        query = Query(
            self.problem,
            candidates,
            self.grids,
            measured,
            relatives,
            self.traces.texts,
            self._sources,
            self._advice,
            provisional,
            once,
            self._judgements,
        )
        with span("forecast", surrogate=self.label, candidates=len(candidates), measured=len(measured)):
            found = validate_forecasts(self._surrogate.forecast(query), candidates)
            return expect_failing_sources(found, measured)
