"""Lanes and the jobs that are done in them: lanes that are used by one job at a time, and opened side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.sandbox.lane_pools import LanePool
from forecast_harness.trials.variants.verify import LaneJobs


class Lane:
    """Notes who uses it."""

    def __init__(self) -> None:
        self.users, self.closed = 0, False

    def __enter__(self) -> Lane:
        return self

    def give_up(self) -> None:
        """Nothing is under way for long."""

    def give_up_opening(self, waiting: int) -> None:
        """It is open at once."""

    def close(self) -> None:
        self.closed = True


def done(lanes: LanePool, items: Iterable[int], do: Callable[[int, Any], int]) -> list[tuple[int, int]]:
    jobs = LaneJobs(lanes, do)
    jobs.add(items)
    try:
        return list(jobs.results())
    finally:
        jobs.close()


def test_lanes_are_used_by_one_at_a_time_and_closed() -> None:
    made: list[Lane] = []
    both = threading.Barrier(2, timeout=60)

    def opened() -> SandboxLane:
        made.append(Lane())
        return cast("SandboxLane", made[-1])

    def do(item: int, lane: Any) -> int:
        lane.users += 1
        assert lane.users == 1
        if item < 2:
            both.wait()  # two are under way at once
        lane.users -= 1
        return item * item

    with LanePool(opened, 2) as lanes:
        assert dict(done(lanes, range(6), do)) == {n: n * n for n in range(6)}
        assert len(made) == 2
    assert all(lane.closed for lane in made)


def test_what_is_added_while_others_are_done_is_done_too_and_told_once() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def do(item: int, lane: Any) -> int:
        begun.set()
        assert may_end.wait(60)
        return item

    with LanePool(lambda: cast("SandboxLane", Lane()), 2) as lanes:
        jobs = LaneJobs(lanes, do)
        jobs.add([1])
        assert begun.wait(60)
        jobs.add([2, 3])
        may_end.set()
        assert sorted(jobs.results()) == [(1, 1), (2, 2), (3, 3)]
        jobs.add([4])
        assert list(jobs.results()) == [(4, 4)]
        jobs.close()


def test_lanes_open_side_by_side_before_they_are_needed() -> None:
    all_opening = threading.Barrier(3, timeout=60)

    class SlowLane(Lane):
        def __enter__(self) -> Lane:
            all_opening.wait()  # none of them is open before all are being opened
            return super().__enter__()

    made: list[Lane] = []

    def opened() -> SandboxLane:
        made.append(SlowLane())
        return cast("SandboxLane", made[-1])

    with LanePool(opened, 3) as lanes:
        lanes.open_ahead(5)
        lanes.open_ahead(2)
        with lanes.borrowed() as lane:
            assert lane in made
    assert [lane.closed for lane in made] == [True] * 3
