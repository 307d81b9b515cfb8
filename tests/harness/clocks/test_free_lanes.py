"""Who gets which lane, and who waits."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet

import pytest

from forecast_harness.clocks.compilation.requests import BuildRequest
from forecast_harness.clocks.compilation.workers import CompileWorkers, FreeLanes
from forecast_harness.sandbox.jobs import JobStatus, ResourceLimits, SandboxError, SandboxJob
from forecast_harness.sandbox.lane import SandboxLane
from tests.waiting import wait_until


def lane() -> SandboxLane:
    return SandboxLane()  # not opened: it does no job here


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as found:
        yield found


def waits(taken: Future[SandboxLane | None]) -> bool:
    try:
        taken.result(0.05)
    except NotYet:
        return True
    return False


def test_a_quick_job_takes_the_lane_that_is_kept_for_it_and_leaves_others() -> None:
    lanes, kept, other = FreeLanes(), lane(), lane()
    lanes.put(other)
    lanes.keep(kept)
    assert lanes.take(quick=True) is kept
    assert lanes.take(quick=True) is other, "any lane does a quick job"


def test_a_long_job_waits_beside_a_lane_that_is_kept(pool: ThreadPoolExecutor) -> None:
    lanes, kept, other = FreeLanes(), lane(), lane()
    lanes.keep(kept)
    taken = pool.submit(lanes.take)
    assert waits(taken)
    lanes.put(other)
    assert taken.result(10) is other
    assert lanes.take(quick=True) is kept


def test_a_lane_that_comes_back_is_what_it_was(pool: ThreadPoolExecutor) -> None:
    lanes, kept = FreeLanes(), lane()
    lanes.keep(kept)
    assert lanes.take(quick=True) is kept
    lanes.put(kept)
    taken = pool.submit(lanes.take)
    assert waits(taken)
    lanes.end()
    assert taken.result(10) is None


def test_lanes_are_taken_in_the_order_in_which_they_became_free() -> None:
    lanes, made = FreeLanes(), [lane() for _ in range(3)]
    for one in made:
        lanes.put(one)
    assert [lanes.take() for _ in made] == made


def test_a_quick_job_goes_before_a_long_one_that_waits_for_longer(pool: ThreadPoolExecutor) -> None:
    lanes, first, second = FreeLanes(), lane(), lane()
    long = pool.submit(lanes.take)
    assert waits(long)
    quick = pool.submit(lanes.take, quick=True)
    assert waits(quick)
    lanes.put(first)
    assert quick.result(10) is first
    assert waits(long)
    lanes.put(second)
    assert long.result(10) is second


def test_a_long_job_takes_what_quick_ones_that_wait_do_not_need(pool: ThreadPoolExecutor) -> None:
    lanes, made = FreeLanes(), [lane() for _ in range(2)]
    quick, long = pool.submit(lanes.take, quick=True), pool.submit(lanes.take)
    assert waits(quick)
    assert waits(long)
    for one in made:
        lanes.put(one)
    assert {quick.result(10), long.result(10)} == set(made)


def test_nobody_waits_once_no_lane_comes(pool: ThreadPoolExecutor) -> None:
    lanes = FreeLanes()
    waiting = [pool.submit(lanes.take, quick=quick) for quick in (False, True)]
    assert all(map(waits, waiting))
    lanes.end()
    assert [one.result(10) for one in waiting] == [None, None]


def test_other_jobs_run_while_every_worker_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forecast_harness.clocks.compilation.workers._WORKERS_PER_KEPT", 1)
    limits = ResourceLimits(wall_s=60.0)
    quick = SandboxJob("tests.harness.clocks.lane_jobs:say", {"word": "quick"}, {})
    long = SandboxJob("tests.harness.clocks.lane_jobs:sleep", {"seconds": 60.0}, {})
    with CompileWorkers({"arch": 90}, 1) as workers, ThreadPoolExecutor(1) as pool:
        (first,) = workers.run_jobs([quick], limits)  # a lane of either kind has come
        assert first.status is JobStatus.OK, first.detail
        busy = pool.submit(workers._run_job, long, limits)
        while not workers._began:
            pass
        (found,) = workers.run_jobs([quick], limits)
        assert (found.status, found.value) == (JobStatus.OK, "quick")
        assert not busy.done()
        workers.give_up(0.0)
        assert isinstance(busy.exception(30), SandboxError), "it had not ended by itself"


def test_a_compilation_that_nobody_waits_for_frees_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ResourceLimits(wall_s=60.0)
    quick = SandboxJob("tests.harness.clocks.lane_jobs:say", {"word": "quick"}, {})
    long = SandboxJob("tests.harness.clocks.lane_jobs:sleep", {"seconds": 60.0}, {})
    with CompileWorkers({"arch": 90}, 1) as workers:
        monkeypatch.setattr(workers, "_job", lambda request: long)
        first, second = (workers.submit(BuildRequest("x", "", "run", ())) for _ in range(2))
        wait_until(lambda: workers.seconds_of(first) > 0.3, "the compilation")
        assert workers.seconds_of(second) == 0.0, "it waits for a worker"
        workers.end(second)
        assert second.cancelled(), "it had not begun"
        workers.end(first)
        assert first.result(30).infrastructure
        assert not workers._compiling
        (found,) = workers.run_jobs([quick], limits)
        assert (found.status, found.value) == (JobStatus.OK, "quick")
        workers.end(first)  # it has ended: nothing else is
        assert workers.idle == 1
