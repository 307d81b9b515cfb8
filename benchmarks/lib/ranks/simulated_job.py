"""A job of simulated ranks that tune together, as `forecast_autotune.ranks` has it, and what must be true of it after.

The code under test is `tune_together` with the whole loop, boards and measurers as they are. Simulated are the
store (its delays are random), the device (a table, which takes its recorded time), the clock, and kills.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from benchmarks.lib.ranks.virtual_time import VirtualProcess, VirtualTime
from forecast_autotune.ranks.job import Job, JobLimits
from forecast_autotune.ranks.job_store import MemoryKeyValueStore
from forecast_autotune.ranks.tuning import tune_together
from forecast_autotune.records import Candidate, Decision, Kernel, Measurement, Problem
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.protocol import Forecasts, Query, Surrogate
from forecast_autotune.testing import example_table
from forecast_autotune.tuning.replays.table_measurer import TableMeasurer
from forecast_autotune.tuning.task import TuningTask

SLOWEST_ANSWER_S = 1.0
"""Seconds that the simulated store takes at most, each way."""


CACHED_S = 0.005
"""Seconds to load what another rank of the host has compiled."""


class FlatSurrogate:
    """Expects the same of every candidate, in no time."""

    name, version = "flat", "1"

    def forecast(self, query: Query) -> Forecasts:
        """Eightfold either way, and no draws that have to be computed."""
        n = len(query.candidates)
        return Forecasts(query.candidates, np.zeros(n), np.full(n, 1.0), np.zeros(n), None, "flat")


def small_problem(number: int) -> Table:
    """One of many problems with 12 candidates, one of which fails."""
    made = example_table(sizes=(16, 32, 64, 128), warps=(2, 4, 8), seed=number)
    kernel = Kernel("simulated", source="def simulated(): ...", source_sha256="0" * 64)
    problem = Problem.of(kernel, made.problem.arguments, made.problem.device, key=(str(number),))
    return Table(problem, [replace(m, problem=problem.id, protocol="example") for m in made.measurements])


def task_of(table: Table) -> TuningTask:
    """The task that a table recorded, with its IR."""
    ttir = table.problem.ttir
    trace = (lambda candidates: ttir) if ttir else None
    return TuningTask(table.problem, list(table.by_candidate()), grids=table.grids(), trace=trace)


@dataclass(frozen=True)
class Hazards:
    """What may happen to the ranks of a schedule."""

    kills: float = 0.2
    """Share of ranks that are killed, at a random moment."""
    missing: float = 0.25
    """Share of a rank's keys that it never meets."""
    late_s: float = 3.0
    """Ranks begin, and go from key to key, within so many seconds."""
    slow_answers: float = 0.01
    """Share of the store's answers that take up to a second."""
    slow_candidates: float = 0.02
    """Share of timings that take up to twice the time that others wait."""


@dataclass
class Attempt:
    """One key on one rank."""

    rank: int
    problem: str
    begin: float
    end: float | None = None
    decision: Decision | None = None
    measured: int = 0
    busy: list[tuple[float, float]] = field(default_factory=list)
    """When its own device or compiler worked."""
    slow_answers: list[tuple[float, float]] = field(default_factory=list)
    """When it waited for a slow answer of the store itself."""


@dataclass
class SimulatedRun:
    """What happened."""

    attempts: list[Attempt] = field(default_factory=list)
    timed: list[tuple[float, int, str, Candidate]] = field(default_factory=list)
    """(moment, rank, problem, candidate) of every timing that was completed."""
    entries: list[tuple[float, str]] = field(default_factory=list)
    """(moment, text) of everything written to logs."""
    killed_at: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0


class _RankStore:
    """One rank's connection to the job's store."""

    def __init__(self, job: SimulatedJob, process: VirtualProcess, chance: random.Random) -> None:
        self._job, self._process, self._chance = job, process, chance
        self._beats: set[str] = set()
        self.attempt: Attempt | None = None
        """What the rank is at."""

    def get(self, key: str) -> str | None:
        self._delay()
        found = self._job.values.get(key)
        self._delay()
        return found

    def set(self, key: str, value: str) -> None:
        self._delay()
        self._job.values.set(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        self._delay()
        stands = self._job.values.compare_set(key, expected, desired)
        if stands == desired:
            self._job.run.entries.append((self._job.time.now(), desired))
        self._delay()
        return stands

    @contextmanager
    def beating(self, key: str) -> Iterator[None]:
        self._beats.add(key)
        self._beat(key, 1)
        try:
            yield
        finally:
            self._beats.discard(key)

    def _beat(self, key: str, count: int) -> None:
        if key not in self._beats or self._process.killed or self._process.ended:
            return
        self._job.values.set(key, str(count))
        time = self._job.time
        time.call_at(time.now() + self._job.limits.beat_s, lambda: self._beat(key, count + 1))

    def _delay(self) -> None:
        time, chance = self._job.time, self._chance
        if chance.random() >= self._job.hazards.slow_answers:
            time.sleep(chance.random() * 0.001)
            return
        before = time.now()
        time.sleep(chance.random() * SLOWEST_ANSWER_S)
        if self.attempt is not None:
            self.attempt.slow_answers.append((before, time.now()))


class _SimulatedDevice(TableMeasurer):
    """A table that takes its recorded time on the virtual clock."""

    def __init__(self, table: Table, job: SimulatedJob, attempt: Attempt, chance: random.Random) -> None:
        super().__init__(table, workers=job.workers or chance.randint(1, 4))
        self._job, self._attempt, self._chance = job, attempt, chance
        self._begin = job.time.now()

    def ready(self) -> Collection[Candidate]:
        self._catch_up()
        return super().ready()

    def compiling(self) -> Mapping[Candidate, float]:
        self._catch_up()
        return super().compiling()

    def measure(
        self,
        candidates: Sequence[Candidate],
        *,
        prefetch: Sequence[Candidate] = (),
        within_s: float | None = None,
    ) -> Iterator[Measurement]:
        self._catch_up()
        for m in super().measure(candidates, prefetch=prefetch, within_s=within_s):
            if self._chance.random() < self._job.hazards.slow_candidates:
                self._pass(self._chance.random() * 2 * self._job.limits.wait_s)
            a = self._attempt
            a.measured += 1
            self._job.run.timed.append((self._job.time.now(), a.rank, a.problem, m.candidate))
            yield m

    def _pass(self, seconds: float) -> None:
        before = self._job.time.now()
        self._job.time.sleep(seconds)
        self._attempt.busy.append((before, self._job.time.now()))
        self._catch_up()

    def _compile_seconds(self, candidate: Candidate) -> float:
        # The ranks of a host share Triton's cache.
        known = (self._attempt.problem, candidate) in self._job.compiled
        return CACHED_S if known and self._job.workers else super()._compile_seconds(candidate)

    def _catch_up(self) -> None:
        behind = self._job.time.now() - self._begin - self._now
        if behind > 0:
            super()._pass(behind)
            self._job.compiled.update((self._attempt.problem, c) for c in self._ready)


class SimulatedJob:
    """`size` ranks, some problems, one seed: the same run every time."""

    def __init__(
        self,
        size: int,
        seed: int,
        *,
        problems: Sequence[Table],
        hazards: Hazards | None = None,
        limits: JobLimits | None = None,
        mode: Mode = Mode.TUNE,
        workers: int = 0,
        surrogate: Surrogate | None = None,
    ) -> None:
        """`workers` are each rank's; with 0 they are drawn, and every rank compiles for itself."""
        self.workers, self._surrogate = workers, surrogate or FlatSurrogate()
        self.compiled: set[tuple[str, Candidate]] = set()
        """(problem, candidate) of what some rank has compiled."""
        self.limits, self.hazards, self.size = limits or JobLimits(), hazards or Hazards(), size
        self.time, self.values, self.run = VirtualTime(), MemoryKeyValueStore(), SimulatedRun()
        self._tables, self._mode = {t.problem.id: t for t in problems}, mode
        self._chance = random.Random(seed)

    def simulate(self) -> SimulatedRun:
        """Run all ranks to their ends."""
        for rank in range(self.size):
            chance = random.Random(self._chance.random())
            keys = [k for k in self._tables if chance.random() >= self.hazards.missing]
            chance.shuffle(keys)
            process = VirtualProcess()
            work = partial(self._decide_each, rank, process, keys, chance)
            self.time.start(process, work, chance.random() * self.hazards.late_s)
            if chance.random() < self.hazards.kills:
                moment = chance.random() * 3 * self.hazards.late_s
                self.time.call_at(moment, partial(self._kill, rank, process))
        self.time.run()
        self.run.seconds = self.time.now()
        return self.run

    def _kill(self, rank: int, process: VirtualProcess) -> None:
        if not process.ended:
            self.run.killed_at[rank] = self.time.now()
            self.time.kill(process)

    def _decide_each(
        self, rank: int, process: VirtualProcess, keys: Sequence[str], chance: random.Random
    ) -> None:
        """What a rank does: one problem after the other."""
        connection = _RankStore(self, process, chance)
        job = Job(connection, rank, self.size, self.limits, self.time, name=f"{rank}-{chance.random()}")
        store, settings = Store(None), Settings(mode=self._mode)
        for key in keys:
            table = self._tables[key]
            attempt = Attempt(rank, key, self.time.now())
            self.run.attempts.append(attempt)
            connection.attempt = attempt
            attempt.decision = tune_together(
                task_of(table),
                partial(_SimulatedDevice, table, self, attempt, chance),
                store=store,
                surrogate=self._surrogate,
                settings=settings,
                job=job,
            )
            attempt.end = self.time.now()
            self.time.sleep(chance.random() * self.hazards.late_s)


RULES = ("repeated", "disagreed", "overdue")


def broken_rules(run: SimulatedRun, limits: JobLimits) -> Counter[str]:
    """How often each of `RULES` was broken, and how often a candidate was measured again after its holder's death.

    repeated: measured by two ranks although the first of them lived. disagreed: another choice than the first rank
    that returned from this problem. overdue: a wait without news beyond the limit and a beat.
    """
    found: Counter[str] = Counter(dict.fromkeys(RULES, 0))
    first: dict[tuple[str, Candidate], int] = {}
    for moment, rank, problem, candidate in sorted(run.timed, key=lambda t: t[0]):
        holder = first.setdefault((problem, candidate), rank)
        if holder != rank:
            died = run.killed_at.get(holder)
            found["repeated" if died is None or died > moment else "taken_over"] += 1
            first[problem, candidate] = rank
    chosen: dict[str, Candidate] = {}
    for a in run.attempts:
        if a.decision is not None:
            found["disagreed"] += chosen.setdefault(a.problem, a.decision.chosen) != a.decision.chosen
    for a in run.attempts:
        if a.end is not None:
            found["overdue"] += longest_wait(a, run) > limits.wait_s + limits.beat_s
    return found


def longest_wait(attempt: Attempt, run: SimulatedRun) -> float:
    """Seconds for which a rank neither worked nor heard of a measurement of the problem it was deciding.

    What the store itself took for slow answers in between is left out.
    """
    assert attempt.end is not None
    heard = [
        (moment, moment)
        for moment, text in run.entries
        if '"row"' in text and attempt.problem in text and attempt.begin <= moment <= attempt.end
    ]
    longest, since = 0.0, attempt.begin
    for begin, end in sorted([*attempt.busy, *heard, (attempt.end, attempt.end)]):
        slow = sum(max(0.0, min(e, begin) - max(b, since)) for b, e in attempt.slow_answers)
        longest = max(longest, begin - since - slow)
        since = max(since, end)
    return longest
