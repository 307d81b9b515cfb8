"""What takes seconds to open is opened before it is asked for, and closed if it never is."""

from __future__ import annotations

import threading

import pytest

from forecast_harness.trials.judging.early_opener import EarlyOpener
from forecast_harness.trials.protocol import LaneFailure


class Lane:
    """Notes that it was closed."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_the_first_one_is_opened_before_anybody_asks() -> None:
    opened, made = threading.Event(), list[Lane]()

    def make() -> Lane:
        made.append(Lane())
        opened.set()
        return made[-1]

    lanes = EarlyOpener(make)
    assert opened.wait(60)
    assert [lanes(), lanes()] == made
    lanes.close()
    assert not any(one.closed for one in made)


def test_what_nobody_asked_for_is_closed() -> None:
    opened, lane = threading.Event(), Lane()

    def make() -> Lane:
        opened.set()
        return lane

    lanes = EarlyOpener(make)
    assert opened.wait(60)
    lanes.close()
    assert lane.closed


def test_who_asks_hears_why_it_could_not_be_opened() -> None:
    def make() -> Lane:
        raise LaneFailure("no lane works", "lane")

    lanes = EarlyOpener(make)
    with pytest.raises(LaneFailure, match="no lane works"):
        lanes()
    lanes.close()
    EarlyOpener(make).close()


def test_what_is_being_opened_at_the_end_is_given_up_whoever_waits_for_it() -> None:
    begun, ended = threading.Event(), threading.Event()

    def make() -> Lane:
        begun.set()
        assert ended.wait(60)
        raise LaneFailure("given up", "lane")

    lanes = EarlyOpener(make, ended.set)
    heard: list[LaneFailure] = []

    def ask() -> None:
        try:
            lanes()
        except LaneFailure as failure:
            heard.append(failure)

    waiting = threading.Thread(target=ask)
    waiting.start()
    assert begun.wait(60)
    lanes.close()
    waiting.join(60)
    assert [str(one) for one in heard] == ["given up"]
