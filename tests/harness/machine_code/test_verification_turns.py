"""Who is verified in full: one at a time, the fastest of those that wait, and none that cannot lead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from forecast_harness.machine_code.verification_turns import VerificationTurns

GAIN = -0.01


class Node(threading.Thread):
    """Takes one turn, and holds it until it is told to go on; right ones say so."""

    def __init__(self, turns: VerificationTurns, score: float, *, is_right: bool = True) -> None:
        super().__init__(daemon=True)
        self._turns, self._score, self._is_right = turns, score, is_right
        self.has_turn: bool | None = None
        self.began, self.may_go_on = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with self._turns.take(self._score, 0.0) as found:
            self.has_turn = found
            self.began.set()
            if found:
                self.may_go_on.wait(60)
                if self._is_right:
                    self._turns.note_verified(self._score)


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(6000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it never held")


@pytest.fixture
def turns() -> VerificationTurns:
    return VerificationTurns(GAIN)


def begin(turns: VerificationTurns, *scores: float, is_first_right: bool = True) -> list[Node]:
    """The first has its turn, all others wait."""
    first = Node(turns, scores[0], is_right=is_first_right)
    assert first.began.wait(60)
    others = [Node(turns, s) for s in scores[1:]]
    wait_until(lambda: len(turns._waiting) == len(others))
    assert [n.has_turn for n in others] == [None] * len(others)
    return [first, *others]


def test_what_is_no_faster_than_a_verified_one_has_no_turn(turns: VerificationTurns) -> None:
    first, slower, hardly_faster = begin(turns, -0.5, -0.4, -0.505)
    first.may_go_on.set()
    assert slower.began.wait(60)
    assert hardly_faster.began.wait(60)
    assert (slower.has_turn, hardly_faster.has_turn) == (False, False)


def test_the_fastest_of_those_that_wait_is_next(turns: VerificationTurns) -> None:
    first, slow, fast = begin(turns, -0.1, -0.3, -0.8)
    first.may_go_on.set()
    assert fast.began.wait(60)
    assert (fast.has_turn, slow.has_turn) == (True, None)
    fast.may_go_on.set()
    assert slow.began.wait(60)
    assert slow.has_turn is False


def test_after_one_that_is_refused_the_next_has_its_turn(turns: VerificationTurns) -> None:
    wrong, right = begin(turns, -0.9, -0.3, is_first_right=False)
    wrong.may_go_on.set()
    assert right.began.wait(60)
    assert right.has_turn
    right.may_go_on.set()


def test_what_it_was_timed_beside_counts_as_verified(turns: VerificationTurns) -> None:
    with turns.take(-0.2, -0.6) as has_turn:
        assert not has_turn
    with turns.take(-0.7, -0.6) as has_turn:
        assert has_turn


def test_an_error_in_a_turn_gives_it_back(turns: VerificationTurns) -> None:
    with pytest.raises(ValueError, match="wrong"), turns.take(-0.2, 0.0):
        raise ValueError("wrong")
    with turns.take(-0.2, 0.0) as has_turn:
        assert has_turn


def test_the_end_wakes_all_and_gives_no_turn(turns: VerificationTurns) -> None:
    first, second = begin(turns, -0.5, -0.9)
    turns.end()
    assert second.began.wait(60)
    assert second.has_turn is False
    first.may_go_on.set()
    with turns.take(-2.0, 0.0) as has_turn:
        assert not has_turn
