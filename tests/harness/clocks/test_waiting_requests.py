"""Which requests a worker takes, in which order, and which of them together."""

from __future__ import annotations

from concurrent.futures import Future, wait

from forecast_harness.clocks.compilation.workers import WaitingRequest, WaitingRequests

MOST = 4


def queue_of(*asked: str) -> WaitingRequests[str, str]:
    """Requests whose key is the letter that they begin with; none where that is a dot."""
    waiting = WaitingRequests[str, str](MOST)
    for one in asked:
        waiting.add(WaitingRequest(one, None if one[0] == "." else one[0]))
    return waiting


def taken(waiting: WaitingRequests[str, str], workers: int = 1) -> list[str]:
    return [one.request for one in waiting.take(workers)]


def all_taken(waiting: WaitingRequests[str, str], workers: int = 1) -> list[list[str]]:
    found = []
    while one := taken(waiting, workers):
        found.append(one)
    return found


def test_first_come_is_first_served() -> None:
    assert all_taken(queue_of("a", "b", "c", "d")) == [["a"], ["b"], ["c"], ["d"]]


def test_where_nothing_waits_nothing_is_taken() -> None:
    assert taken(queue_of()) == []


def test_others_of_the_firsts_key_come_with_it_and_what_is_between_keeps_its_place() -> None:
    assert all_taken(queue_of("a1", "b1", "a2", "b2", "c1", "a3")) == [
        ["a1", "a2", "a3"],
        ["b1", "b2"],
        ["c1"],
    ]


def test_no_more_than_the_most_are_taken_together() -> None:
    asked = [f"a{n}" for n in range(11)]
    assert all_taken(queue_of(*asked)) == [asked[:4], asked[4:8], asked[8:]]


def test_none_comes_with_another_where_each_could_have_a_worker_of_its_own() -> None:
    waiting = queue_of("a1", "a2", "a3")
    assert all_taken(waiting, workers=3) == [["a1"], ["a2"], ["a3"]]


def test_more_are_taken_together_the_longer_the_queue_is_for_the_workers() -> None:
    asked = [f"a{n}" for n in range(9)]
    assert [len(taken(queue_of(*asked), workers)) for workers in (1, 2, 3, 4, 8, 9)] == [4, 4, 3, 3, 2, 1]
    # Of eight for four workers two go with the first one, which leaves five: one of them goes with the next.
    assert [len(some) for some in all_taken(queue_of(*asked[:8]), 4)] == [2, 2, 1, 1, 1, 1]


def test_a_long_queue_of_other_keys_counts_too() -> None:
    assert taken(queue_of("a1", "b", "c", "a2", "a3"), workers=2) == ["a1", "a2", "a3"]
    assert taken(queue_of("a1", "b", "a2", "a3"), workers=2) == ["a1", "a2"]


def test_what_has_no_key_is_taken_alone() -> None:
    assert all_taken(queue_of(".1", ".2", "a1", ".3", "a2")) == [[".1"], [".2"], ["a1", "a2"], [".3"]]


def test_what_is_taken_can_be_cancelled_no_more_and_what_waits_can() -> None:
    waiting = queue_of("a1", "a2", "b1")
    first, second = waiting.take(1)
    assert first.answer.running()
    assert second.answer.running()
    assert not first.answer.cancel()
    assert not second.answer.cancel()
    (third,) = waiting.take(1)
    assert third.request == "b1"


def test_what_was_cancelled_is_passed_over_first_or_not() -> None:
    waiting = WaitingRequests[str, str](MOST)
    made = [WaitingRequest[str, str](f"a{n}", "a") for n in range(5)]
    for one in made:
        waiting.add(one)
    for n in (0, 2):
        assert made[n].answer.cancel()
    assert waiting.take(1) == [made[1], made[3], made[4]]
    assert waiting.take(1) == []


def test_where_all_were_cancelled_nothing_is_taken() -> None:
    waiting = WaitingRequests[str, str](MOST)
    for key in ("a", None):
        one = WaitingRequest[str, str]("x", key)
        waiting.add(one)
        one.answer.cancel()
    assert waiting.take(1) == []


def test_all_that_wait_are_cancelled_and_what_was_taken_is_not() -> None:
    waiting = WaitingRequests[str, str](MOST)
    made = [WaitingRequest[str, str]("x", key) for key in ("a", None, "a", "b")]
    for one in made:
        waiting.add(one)
    first, with_it = waiting.take(1)
    waiting.cancel()
    assert [one.answer.cancelled() for one in made] == [False, True, False, True]
    assert first.answer.running()
    assert with_it.answer.running()
    assert waiting.take(1) == []


def test_who_waits_for_what_is_cancelled_is_told_at_once() -> None:
    waiting, told = queue_of(), list[Future[str]]()
    one = WaitingRequest[str, str]("x")
    one.answer.add_done_callback(told.append)
    waiting.add(one)
    waiting.cancel()
    assert told == [one.answer]
    assert wait([one.answer], 0).done == {one.answer}


def test_what_was_begun_first_goes_first_whenever_it_came() -> None:
    queue = WaitingRequests[str, str](1)
    for name, began in (("late", 2.0), ("early", 1.0), ("early again", 1.0)):
        queue.add(WaitingRequest(name, began=began))
    order = [queue.take(1)[0].request for _ in range(3)]
    assert order == ["early", "early again", "late"]
