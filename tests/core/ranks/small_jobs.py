"""Ranks of one small job in one process: a clock that tests move, a store in memory, one decision each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from forecast_autotune.ranks.board import Board
from forecast_autotune.ranks.job import Job, JobLimits
from forecast_autotune.ranks.job_store import JobStore, MemoryKeyValueStore
from forecast_autotune.ranks.tuning import board_name, tune_together
from forecast_autotune.records import Decision, Kernel, Problem
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.testing import example_table
from forecast_autotune.tuning.task import TuningTask
from tests.core.tuning.loop import Bench

TABLE = example_table()
NAMES = [m.candidate for m in TABLE.measurements]
EXHAUSTIVE = Settings(mode=Mode.EXHAUSTIVE)


class ManualClock:
    """Time passes where somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        # As on a host, where no sleep takes no time.
        self.seconds += max(seconds, 1e-4)


def ranks(
    size: int = 2, values: JobStore | None = None, clock: Any = None, limits: JobLimits | None = None
) -> list[Job]:
    """All ranks of a job, on one clock."""
    values, clock = values or MemoryKeyValueStore(), clock or ManualClock()
    return [Job(values, rank, size, limits or JobLimits(), clock) for rank in range(size)]


def task_of(table: Table = TABLE) -> TuningTask:
    return TuningTask(table.problem, list(table.by_candidate()))


def board(job: Job, settings: Settings = EXHAUSTIVE, table: Table = TABLE) -> Board:
    """The problem's board as this rank sees it."""
    task = task_of(table)
    return Board(job, task, board_name(task, settings, None))


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
