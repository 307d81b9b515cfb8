"""The simulated clock of a table: workers, cancellations, and waits that end early."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Candidate, Config, Outcome
from forecast_autotune.records.table import Table
from forecast_autotune.testing import example_table
from forecast_autotune.tuning.replays.table_measurer import (
    DEFAULT_COMPILE_S,
    HUNG_COMPILE_S,
    TableMeasurer,
    recorded_compile_seconds,
)

PLAIN = example_table()
NAMES = [m.candidate for m in PLAIN.measurements]


def measurer(*seconds: float, workers: int = 2, timing_s: float = 0.25) -> TableMeasurer:
    """Candidates that compile for so many seconds, in order; the others for a second."""
    each = [*seconds, *[1.0] * (len(NAMES) - len(seconds))]
    rows = [replace(m, compile_s=s) for m, s in zip(PLAIN.measurements, each, strict=True)]
    return TableMeasurer(Table(PLAIN.problem, rows), workers=workers, timing_s=timing_s)


def test_workers_compile_side_by_side_while_others_are_timed() -> None:
    clock = measurer(1.0, 2.0, 1.0)
    found = [(m.candidate, clock.spent().wall_s) for m in clock.measure(NAMES[:3])]
    # The third starts after 1 s, and is ready when the second is; both are timed one after the other.
    assert found == [(NAMES[0], 1.25), (NAMES[1], 2.25), (NAMES[2], 2.5)]
    assert clock.spent().compiled == 3
    assert clock.spent().compile_s == pytest.approx(4.0)
    assert clock.spent().timing_s == pytest.approx(0.75)


def test_a_failure_takes_no_time_on_the_device_and_a_recorded_timeout_is_given_up_earlier() -> None:
    fails = PLAIN.measurements[-1]
    assert fails.outcome is Outcome.OUT_OF_RESOURCES
    clock = TableMeasurer(PLAIN, workers=1)
    assert [m.outcome for m in clock.measure([fails.candidate])] == [fails.outcome]
    assert clock.spent().timing_s == 0.0
    late = replace(fails, outcome=Outcome.TIMEOUT, compile_s=60.0)
    clock = TableMeasurer(Table(PLAIN.problem, [late]), workers=1)
    assert len(list(clock.measure([late.candidate]))) == 1
    assert clock.spent().wall_s == HUNG_COMPILE_S


def test_rows_that_were_not_compiled_take_what_others_of_the_table_took() -> None:
    """A binary from a cache, and a row that was timed again, would else seem far quicker or slower to compile."""
    seconds = [3.0, 2.0, 4.0, 0.001, None]
    rows = [replace(m, compile_s=s) for m, s in zip(PLAIN.measurements, seconds, strict=False)]
    table = Table(PLAIN.problem, rows)
    assert list(recorded_compile_seconds(table).values()) == [3.0, 2.0, 4.0, 3.0, 3.0]
    few = Table(PLAIN.problem, rows[1:])
    assert list(recorded_compile_seconds(few).values()) == [2.0, 4.0, DEFAULT_COMPILE_S, DEFAULT_COMPILE_S]
    clock = TableMeasurer(table, workers=1, timing_s=0.0)
    assert [m.candidate for m in clock.measure(NAMES[3:5])] == NAMES[3:5]
    assert clock.spent().wall_s == pytest.approx(6.0)


def test_what_is_prefetched_uses_idle_workers_and_is_compiled_once() -> None:
    clock = measurer()
    clock.prefetch(NAMES[:5])
    assert set(clock.compiling()) == set(NAMES[:2])
    (found,) = clock.measure(NAMES[:1])
    assert found.candidate == NAMES[0]
    assert clock.spent().wall_s == pytest.approx(1.25)
    assert set(clock.ready()) == {NAMES[1]}
    assert clock.spent().compiled == 2


def test_what_is_prefetched_waits_for_a_worker_and_what_is_timed_is_not_compiled_again() -> None:
    clock = measurer(1.0, 1.0, 1.0, workers=1, timing_s=0.0)
    clock.prefetch(NAMES[:3])
    for name in NAMES[:3]:
        list(clock.measure([name], prefetch=NAMES[:3]))
    assert clock.spent().wall_s == 3.0
    assert clock.spent().compiled == 3


def test_who_waits_hears_when_nothing_has_come_in_time() -> None:
    clock = measurer(1.0, 3.0)
    assert list(clock.measure(NAMES[:2], within_s=0.5)) == []
    assert clock.compiling() == {NAMES[0]: 0.5, NAMES[1]: 0.5}
    assert [m.candidate for m in clock.measure(NAMES[:2], within_s=0.5)] == [NAMES[0]]
    # 1 s of compilation, 0.25 s of timing, and half a second without news.
    assert clock.spent().wall_s == pytest.approx(1.75)
    assert [m.candidate for m in clock.measure(NAMES[1:2])] == [NAMES[1]]
    assert clock.spent().wall_s == pytest.approx(3.25)
    assert clock.spent().compiled == 2


def test_what_is_not_listed_is_given_up_where_its_worker_is_needed_and_goes_on_elsewhere() -> None:
    clock = measurer(9.0, 9.0)
    clock.prefetch(NAMES[:2])
    assert list(clock.measure([], within_s=0.1)) == []
    assert set(clock.compiling()) == set(NAMES[:2]), "nobody needs a worker"
    assert [m.candidate for m in clock.measure(NAMES[2:3])] == [NAMES[2]]
    assert len(set(clock.compiling()) & set(NAMES[:2])) == 1, "one worker was needed"
    assert [m.candidate for m in clock.measure([*NAMES[3:4], *clock.compiling()], within_s=1.0)] == [NAMES[3]]
    assert len(set(clock.compiling()) & set(NAMES[:2])) == 1, "what is listed goes on"
    assert clock.spent().compiled == 2, "what was given up was not compiled"


def test_a_list_replaces_what_was_queued() -> None:
    clock = measurer(workers=1)
    next(clock.measure(NAMES[:3]))
    rest = [m.candidate for m in clock.measure([NAMES[3]])]
    assert rest == [NAMES[3]]
    assert NAMES[2] not in clock.ready()
    assert clock.spent().compiled <= 3


def test_a_candidate_without_a_row_is_refused() -> None:
    with pytest.raises(RecordError, match="has no row for"):
        list(measurer().measure([Candidate(Config.of({"NO": 1}))]))
