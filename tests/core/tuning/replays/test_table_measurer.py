"""The simulated clock of a table: workers, cancellations, and waits that end early."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Candidate, Config, Outcome
from forecast_autotune.records.table import Table
from forecast_autotune.testing import example_table
from forecast_autotune.tuning.replays.table_measurer import (
    HUNG_COMPILE_S,
    TableMeasurer,
)

PLAIN = example_table()
NAMES = [m.candidate for m in PLAIN.measurements]


def measurer(*seconds: float) -> TableMeasurer:
    """Candidates that compile for so many seconds, in order; the others for a second."""
    each = [*seconds, *[1.0] * (len(NAMES) - len(seconds))]
    rows = [replace(m, compile_s=s) for m, s in zip(PLAIN.measurements, each, strict=True)]
    return TableMeasurer(Table(PLAIN.problem, rows), workers=2, timing_s=0.25)


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


def test_what_is_prefetched_uses_idle_workers_and_is_compiled_once() -> None:
    clock = measurer()
    clock.prefetch(NAMES[:5])
    assert set(clock.compiling()) == set(NAMES[:2])
    (found,) = clock.measure(NAMES[:1])
    assert found.candidate == NAMES[0]
    assert clock.spent().wall_s == pytest.approx(1.25)
    assert set(clock.ready()) == {NAMES[1]}
    assert clock.spent().compiled == 2


def test_a_candidate_without_a_row_is_refused() -> None:
    with pytest.raises(RecordError, match="has no row for"):
        list(measurer().measure([Candidate(Config.of({"NO": 1}))]))
