"""What a shared measurer undertakes, and when."""

from __future__ import annotations

from collections.abc import Sequence

from forecast_autotune.ranks.job import JobLimits
from forecast_autotune.ranks.shared_measurer import SharedMeasurer
from forecast_autotune.records import Candidate
from forecast_autotune.testing import MeasurerContract, TableMeasurer
from forecast_autotune.tuning.measurer import Measurer
from tests.core.ranks.small_jobs import NAMES, TABLE, board, ranks


class TestAMeasurerThatNobodySharesWith(MeasurerContract):
    def make(self) -> tuple[Measurer, Sequence[Candidate]]:
        first, _ = ranks()
        return SharedMeasurer(TableMeasurer(TABLE, workers=4), board(first), 60.0), NAMES


def test_ranks_that_begin_at_once_divide_what_is_wanted_evenly() -> None:
    jobs = ranks(3)
    boards = [board(job) for job in jobs]
    for own in boards:
        SharedMeasurer(TableMeasurer(TABLE, workers=8), own, 60.0).prefetch(NAMES[:12])
    parts = [set(own.claimed_here()) for own in boards]
    assert [len(part) for part in parts] == [4, 4, 4]
    assert set.union(*parts) == set(NAMES[:12])
    assert all(NAMES[i] in part for i, part in enumerate(parts)), "the best first on every rank"


def test_a_rank_by_itself_soon_fills_its_workers_and_undertakes_no_more() -> None:
    job = ranks(64)[0]
    own = board(job)
    measurer = SharedMeasurer(TableMeasurer(TABLE, workers=4), own, 60.0)
    next(measurer.measure(NAMES))
    assert len(own.claimed_here()) == 5, "one for each worker, and one to follow"


def test_what_others_compile_counts_as_compiling_and_their_workers_as_workers() -> None:
    first, second = ranks()
    board(first).claim(NAMES[:2], 2)
    measurer = SharedMeasurer(TableMeasurer(TABLE, workers=4), board(second), 60.0)
    assert measurer.workers == 4
    measurer.prefetch(NAMES[:2])
    second.clock.sleep(1.5)
    assert dict(measurer.compiling()) == {NAMES[0]: 1.5, NAMES[1]: 1.5}
    assert measurer.workers == 8
    assert not measurer.ready()


def test_what_a_plan_no_longer_wants_is_left_to_others() -> None:
    first, second = ranks()
    own = board(first)
    measurer = SharedMeasurer(TableMeasurer(TABLE, workers=2), own, 60.0)
    list(measurer.measure(NAMES[:3], within_s=0.0))
    assert own.claimed_here()
    list(measurer.measure(NAMES[3:4], within_s=0.0))
    assert set(own.claimed_here()) & set(NAMES[:3]), "plans waver"
    first.clock.sleep(1.0)
    list(measurer.measure(NAMES[3:4], within_s=0.0))
    assert not set(own.claimed_here()) & set(NAMES[:3])
    other = board(second)
    other.read()
    other.claim(NAMES[:3], 3)
    assert set(other.claimed_here()) == set(NAMES[:3])


def test_one_rank_times_the_finalists_and_another_takes_over_if_it_dies() -> None:
    first, second = ranks()
    dead = board(first)
    dead.claim_finale()
    own = board(second)
    measurer = SharedMeasurer(TableMeasurer(TABLE), own, 60.0)
    measurer.compare(NAMES[:2])
    assert own.holds_finale()
    assert JobLimits().lease_s <= second.clock.now() < 60.0
