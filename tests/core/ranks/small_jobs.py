"""Ranks of one small job in one process: a clock that tests move, a store in memory, one decision each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from forecast_autotune.ranks.job import Job, JobLimits
from forecast_autotune.ranks.tuning import Claim, tune_together
from forecast_autotune.records import Decision, Kernel, Problem
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.testing import example_table
from forecast_autotune.tuning.loop import TuningTask
from tests.core.tuning.loop import Bench

TABLE = example_table()
NAMES = [m.candidate for m in TABLE.measurements]
EXHAUSTIVE = Settings(mode=Mode.EXHAUSTIVE)


class MemoryKeyValueStore:
    """A job's store in one process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._mutex = threading.Lock()

    def get(self, key: str) -> str | None:
        with self._mutex:
            return self._values.get(key)

    def set(self, key: str, value: str) -> None:
        with self._mutex:
            self._values[key] = value

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        with self._mutex:
            if self._values.get(key, "") == expected:
                self._values[key] = desired
            return self._values.get(key, expected)

    @contextmanager
    def beating(self, key: str) -> Iterator[None]:
        yield


class ManualClock:
    """Time passes where somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        # As on a host, where no sleep takes no time.
        self.seconds += max(seconds, 1e-4)


def ranks(values: Any = None, clock: Any = None) -> list[Job]:
    """Both ranks of a job, on one clock."""
    values, clock = values or MemoryKeyValueStore(), clock or ManualClock()
    return [Job(values, rank, 2, JobLimits(), clock.now, clock.sleep) for rank in range(2)]


def task_of(table: Table = TABLE) -> TuningTask:
    return TuningTask(table.problem, list(table.by_candidate()))


def claim(job: Job, settings: Settings = EXHAUSTIVE) -> Claim:
    """The problem's claim as this rank sees it."""
    return Claim(job, task_of(), settings, None)


def decide(
    job: Job | None,
    bench: Callable[[], Any] | None = None,
    *,
    store: Any = None,
    settings: Settings = EXHAUSTIVE,
    table: Table = TABLE,
    **options: Any,
) -> Decision:
    """One rank's decision, by default in exhaustive mode with a store of its own."""
    return tune_together(
        task_of(table),
        bench or Bench(table),
        store=store or Store(None),
        surrogate=AnalyticSurrogate(),
        settings=settings,
        job=job,
        **options,
    )


def problem_on(device_name: str) -> Table:
    """The same kernel and key on another device."""
    p = TABLE.problem
    problem = Problem.of(
        Kernel("example", source="def example(): ...", source_sha256="0" * 64),
        p.arguments,
        replace(p.device, name=device_name),
        key=p.key,
    )
    return Table(problem, [replace(m, problem=problem.id) for m in TABLE.measurements])
