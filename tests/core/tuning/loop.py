"""One recorded problem, a measurer that can fail, a surrogate that says what it is told, one decision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from forecast_autotune.policy import Policy
from forecast_autotune.records import Candidate, Decision, Measurement, Outcome
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.protocol import Forecasts, Query
from forecast_autotune.testing import TableMeasurer, example_table
from forecast_autotune.tuning.loop import TuningTask, tune


class Bench(TableMeasurer):
    """A table's measurer that remembers what it was asked, and can be told to fail."""

    def __init__(self, table: Table, *, stop_after: int | None = None) -> None:
        super().__init__(table, workers=4)
        self._rows = {m.candidate: m for m in table.measurements}  # with faults, which a table leaves out
        self.asked: list[Candidate] = []
        self.compared: list[list[Candidate]] = []
        self.closed = 0
        self.made = 0
        self.stop_after = stop_after

    def __call__(self) -> Bench:
        self.made += 1
        return self

    def measure(self, candidates: Sequence[Candidate], **options: Any) -> Iterator[Measurement]:
        for m in super().measure(candidates, **options):
            if self.stop_after is not None and len(self.asked) >= self.stop_after:
                raise KeyboardInterrupt
            self.asked.append(m.candidate)
            yield m

    def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        self.compared.append(list(candidates))
        return super().compare(candidates)

    def close(self) -> None:
        self.closed += 1


class Told:
    """A surrogate that says what it is told."""

    name, version = "told", "1"

    def __init__(self, say: Callable[[Query], Forecasts]) -> None:
        self.say = say
        self.queries: list[Query] = []

    def forecast(self, query: Query) -> Forecasts:
        self.queries.append(replace(query, measured=list(query.measured)))
        return self.say(query)


def constant(mean: float = 0.0, sd: float = 1.0, p_fail: float = 0.0) -> Callable[[Query], Forecasts]:
    def say(query: Query) -> Forecasts:
        n = len(query.candidates)
        return Forecasts(query.candidates, np.full(n, mean), np.full(n, sd), np.full(n, p_fail))

    return say


TABLE = example_table()


def outcomes(outcome: Outcome, table: Table = TABLE, *, but: int | None = None, message: str = "") -> Table:
    """The table with every row failing, except one."""
    rows = [
        m if i == but else Measurement(m.problem, m.candidate, outcome, extra={"message": message})
        for i, m in enumerate(table.measurements)
    ]
    return Table(table.problem, rows)


def timed(times: Mapping[Candidate, float], otherwise_ms: float = 3.0) -> Table:
    """The table with every row running, these in these milliseconds."""
    rows = [
        Measurement(m.problem, m.candidate, Outcome.OK, times.get(m.candidate, otherwise_ms))
        for m in TABLE.measurements
    ]
    return Table(TABLE.problem, rows)


def decide(
    store: Store,
    bench: Bench,
    *,
    table: Table = TABLE,
    surrogate: Any = None,
    policy: Policy | None = None,
    candidates: Sequence[Candidate] | None = None,
    given: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Decision:
    """Decide the table's problem; `given` are further parts of its task."""
    listed = list(table.by_candidate()) if candidates is None else candidates
    task = TuningTask(table.problem, listed, **(given or {}))
    return tune(
        task,
        bench,
        store=store,
        surrogate=surrogate or AnalyticSurrogate(),
        settings=Settings().with_(**settings),
        policy=policy,
    )
