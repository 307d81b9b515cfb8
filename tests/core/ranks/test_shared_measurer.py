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


def test_a_rank_whose_device_is_behind_leaves_the_rest_to_others() -> None:
    first, _ = ranks()
    own = board(first)
    local = TableMeasurer(
        TABLE, workers=4, timing_s=10.0
    )  # while it times one, whatever compiles is compiled
    measurer = SharedMeasurer(local, own, 60.0)
    timed = measurer.measure(NAMES)
    own.post(next(timed))
    before = own.claimed_here()
    assert sum(c in measurer.ready() for c in before) >= 2
    next(timed)
    assert set(own.claimed_here()) <= set(before)


def test_what_others_found_fast_is_compiled_here_for_the_finale_and_the_launch() -> None:
    first, second = ranks()
    ran = sorted((m for m in TABLE.measurements if m.ok), key=lambda m: m.ms)
    seen = board(first)
    for m in (ran[0], ran[-1]):
        seen.post(m)
    seen.claim(NAMES, len(NAMES))
    local = TableMeasurer(TABLE, workers=4)
    measurer = SharedMeasurer(local, board(second), 60.0)
    list(measurer.measure(NAMES, within_s=0.0))
    assert set(local.compiling()) == {ran[0].candidate}
    assert ran[0].candidate not in measurer.ready()


def test_many_ranks_do_not_make_a_plan_wider_than_a_decision_needs() -> None:
    jobs = ranks(8)
    for job, name in zip(jobs[1:], NAMES, strict=False):
        board(job).claim([name], 1)
    small, large = (SharedMeasurer(TableMeasurer(TABLE, workers=w), board(jobs[0]), 60.0) for w in (4, 32))
    for measurer in (small, large):
        measurer.prefetch(NAMES[-1:])
    assert small.workers == 16
    assert large.workers == 32


def test_what_is_held_and_not_wanted_keeps_no_rank_from_what_is() -> None:
    first, _ = ranks()
    own = board(first)
    local = TableMeasurer(TABLE, workers=4, timing_s=10.0)
    measurer = SharedMeasurer(local, own, 60.0)
    own.post(next(measurer.measure(NAMES[:6])))
    held = own.claimed_here()
    assert len(held) >= 2
    found = [m.candidate for m in measurer.measure(NAMES[6:10])]
    assert set(found) == set(NAMES[6:10]), "by this rank, in one call, without giving up on any"
    assert first.clock.now() < 60.0
