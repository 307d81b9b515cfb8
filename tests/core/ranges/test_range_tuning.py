"""One decision for several recorded sizes: what is measured, what is filed where, and what is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forecast_autotune.errors import DeviceLostError
from forecast_autotune.ranges.tuning import (
    RangeMeasurer,
    RangePlan,
    RangePoint,
    RangeRows,
    range_slowdowns,
    tune_range,
)
from forecast_autotune.records import Candidate, Config, Decision, Evidence, Measurement, Outcome, Problem
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Budget, Mode, Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.testing import example_table
from forecast_autotune.tuning.loop import GuardedStore, TuningTask
from forecast_autotune.tuning.replays.table_measurer import TableMeasurer

SMALL, ALL_ROUND, LARGE, BROKEN = (Candidate(Config.of({"BLOCK": b})) for b in (16, 64, 256, 512))
CANDIDATES = (SMALL, ALL_ROUND, LARGE, BROKEN)
TIMES = {
    1: {SMALL: 1.0, ALL_ROUND: 1.1, LARGE: 4.0, BROKEN: 0.5},
    16: {SMALL: 1.5, ALL_ROUND: 1.2, LARGE: 2.0, BROKEN: 0.5},
    256: {SMALL: 8.0, ALL_ROUND: 2.3, LARGE: 2.0, BROKEN: None},
}


def sized_table(size: int) -> Table:
    """A table of one size, with the times above; None is a launch that fails."""
    problem = replace(example_table().problem, id=f"size-{size}", key=(str(size),))
    rows = [
        Measurement(problem.id, c, Outcome.OK if ms else Outcome.OUT_OF_RESOURCES, ms, compile_s=0.5)
        for c, ms in TIMES[size].items()
    ]
    return Table(problem, rows)


def decide(
    store: Store, *, measured: Sequence[int] = (0, 1, 2), worst: bool = False, **options: object
) -> Decision:
    """Decide over the three sizes."""
    tables = [sized_table(size) for size in TIMES]
    points = [RangePoint(t.problem, f"M={t.problem.key[0]}") for t in tables]
    shares = np.eye(3)[:, list(measured)]
    shares[shares.sum(axis=1) == 0] = 1 / len(measured)
    plan = RangePlan(points, measured, np.full(3, 1 / 3), shares, worst)
    return tune_range(
        TuningTask(replace(tables[0].problem, id="range", key=("1..256",)), CANDIDATES),
        plan,
        lambda: [TableMeasurer(tables[i]) for i in measured],
        store=store,
        surrogate=AnalyticSurrogate(),
        settings=Settings().with_(**options),
    )


def test_the_config_that_is_never_far_from_the_best_is_chosen_and_rows_are_filed_by_size(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path)
    decision = decide(store, mode=Mode.EXHAUSTIVE)
    assert decision.chosen == ALL_ROUND
    assert decision.problem == "range"
    assert "M=1 +10.0%, M=16 +0.0%, M=256 +15.0%" in decision.reason
    assert "8.2% slower than the best of each (geometric mean), 15.0% at worst" in decision.reason
    assert decision.median_ms == pytest.approx((1.1 * 1.2 * 2.3) ** (1 / 3))
    by_problem = {t.problem.id: len(t.by_candidate()) for t in Store(tmp_path).tables()}
    assert {name: n for name, n in by_problem.items() if n} == {f"size-{s}": 4 for s in TIMES}
    assert Store(tmp_path).decision(replace(example_table().problem, id="range")) is not None


def test_a_second_process_is_served_without_a_measurement(tmp_path: Path) -> None:
    first = decide(Store(tmp_path))
    before = (tmp_path / "v1").stat(), sum(len(t.measurements) for t in Store(tmp_path).tables())
    second = decide(Store(tmp_path))
    assert (second.chosen, second.evidence, second.measured) == (first.chosen, Evidence.STORED, 0)
    assert second.reason == first.reason
    assert sum(len(t.measurements) for t in Store(tmp_path).tables()) == before[1]


def test_what_is_known_of_a_size_is_not_measured_again() -> None:
    store = Store(None)
    table = sized_table(16)
    for row in table.measurements:
        store.add(table.problem, row)
    decide(store, mode=Mode.EXHAUSTIVE)
    assert len(store.measurements(table.problem)) == 4


def test_sizes_between_are_interpolated_and_marked() -> None:
    decision = decide(Store(None), mode=Mode.EXHAUSTIVE, measured=(0, 2))
    assert "M=1 +10.0%, ~M=16 +0.0%, M=256 +15.0%" in decision.reason

    tables = [sized_table(size) for size in TIMES]
    points = [RangePoint(t.problem, f"M={t.problem.key[0]}") for t in tables]
    shares = np.array([[1.0, 0.0], [0.25, 0.75], [0.0, 1.0]])
    plan = RangePlan(points, (0, 2), np.full(3, 1 / 3), shares)
    rows = RangeRows("range", points, (0, 2), (0.5, 0.5), [list(t.measurements) for t in tables])
    small, middle = range_slowdowns([SMALL, ALL_ROUND], plan, rows)
    between = {c: TIMES[1][c] ** 0.25 * TIMES[256][c] ** 0.75 for c in (SMALL, ALL_ROUND)}
    assert small.by_point == pytest.approx([0.0, between[SMALL] / between[ALL_ROUND] - 1.0, 8.0 / 2.3 - 1.0])
    assert middle.by_point == pytest.approx([0.1, 0.0, 0.0])


def test_the_worst_size_decides_where_that_is_asked_for() -> None:
    slow = {
        SMALL: (1.0, 1.0, 1.3),
        ALL_ROUND: (1.2, 1.2, 1.0),
        LARGE: (3.0, 3.0, 3.0),
        BROKEN: (3.0, 3.0, 3.0),
    }
    kept = {size: dict(times) for size, times in TIMES.items()}
    try:
        for i, size in enumerate(TIMES):
            TIMES[size] = {c: times[i] for c, times in slow.items()}
        assert decide(Store(None), mode=Mode.EXHAUSTIVE).chosen == SMALL
        assert decide(Store(None), mode=Mode.EXHAUSTIVE, worst=True).chosen == ALL_ROUND
    finally:
        TIMES.update(kept)


def test_a_budget_counts_candidates_and_frozen_mode_serves_what_was_measured() -> None:
    store = Store(None)
    decision = decide(store, max_measurements=2)
    assert decision.measured == 2
    assert Budget(measurements=2).measurements == decision.measured
    frozen = decide(store, mode=Mode.FROZEN)
    assert (frozen.chosen, frozen.evidence) == (decision.chosen, Evidence.STORED)


def test_a_config_that_loses_the_device_at_a_later_size_is_recorded_first() -> None:
    kept: list[tuple[int, Outcome]] = []
    tables = [sized_table(size) for size in TIMES]
    rows = RangeRows("range", [RangePoint(t.problem, "") for t in tables], [0, 1], [0.5, 0.5], [[], [], []])

    class Losing(TableMeasurer):
        def measure(
            self, candidates: Sequence[Candidate], **limits: Any
        ) -> Iterator[Measurement]:  # as a device's measurer does
            for candidate in candidates:
                yield Measurement(tables[1].problem.id, candidate, Outcome.TIMEOUT)
                raise DeviceLostError("restart")

    def keep(point: int, found: Measurement) -> None:
        kept.append((point, found.outcome))
        rows.add(point, found)

    measurer = RangeMeasurer([TableMeasurer(tables[0]), Losing(tables[1])], rows, keep)
    with pytest.raises(DeviceLostError):
        list(measurer.measure(CANDIDATES[:1]))
    assert kept == [(0, Outcome.OK), (1, Outcome.TIMEOUT)]


def test_the_decision_is_filed_with_its_slowdowns_before_the_lock_is_released(tmp_path: Path) -> None:
    filed: list[Decision] = []

    class Watching(Store):
        held = False

        def put_decision(self, problem: Problem, decision: Decision) -> None:
            assert self.held
            filed.append(decision)
            super().put_decision(problem, decision)

        @contextmanager
        def tuning_lock(self, problem: Problem, timeout_s: float) -> Iterator[bool]:
            with super().tuning_lock(problem, timeout_s) as self.held:
                yield self.held
                self.held = False

    decision = decide(Watching(tmp_path))
    assert filed == [decision]
    assert "slower than the best of each" in decision.reason


def test_rows_that_a_store_did_not_take_stay_with_their_size() -> None:
    class Full(Store):
        def add(self, problem: Problem, measurement: Measurement) -> None:
            raise OSError("no space")

    store = GuardedStore(Full(None))
    first, second = (sized_table(size).problem for size in list(TIMES)[:2])
    with pytest.warns(UserWarning, match="no space"):
        store.add(first, Measurement(first.id, CANDIDATES[0], Outcome.OK, 1.0))
    assert len(store.measurements(first)) == 1
    assert store.measurements(second) == []
