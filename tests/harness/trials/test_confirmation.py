"""How long a confirmation may take, that it is ended, and what is opened for it early."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from forecast_harness.trials import confirmation as confirmation_limit
from forecast_harness.trials.confirmation import ConfirmationLimit, EarlyOpener
from forecast_harness.trials.protocol import LaneFailure
from forecast_harness.trials.race import QUICK_RULES, THOROUGH_RULES
from forecast_harness.trials.race_job import HalvingRace
from tests.harness.clocks.simulated_clock import SimulatedPairedClock


def test_without_a_limit_contests_are_as_thorough_as_ever() -> None:
    limit = ConfirmationLimit(None)
    assert limit.rules(THOROUGH_RULES) == THOROUGH_RULES
    assert not limit.must_end(100)
    with limit.enforced(lambda: pytest.fail("nobody may end it")):
        pass


def test_contests_share_the_time_there_is() -> None:
    rules = ConfirmationLimit(30.0).rules(THOROUGH_RULES)
    assert (rules.seconds, rules.wall, rules.least) == (5.0, 5.0, THOROUGH_RULES.least)
    assert ConfirmationLimit(3.0).rules(THOROUGH_RULES).wall == 2.0, "two seconds in any case"


def test_the_first_is_confirmed_and_others_as_far_as_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConfirmationLimit, "spent", 20.0)
    assert not ConfirmationLimit(1.0).must_end(0)
    assert not ConfirmationLimit(30.0).must_end(2), "a third at 10 s each fits"
    assert ConfirmationLimit(29.0).must_end(2)


def test_what_takes_too_long_is_given_up_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirmation_limit, "_LEAST_S", 0.0)
    monkeypatch.setattr(confirmation_limit, "_GRACE_S", 0.0)
    monkeypatch.setattr(confirmation_limit, "_GIVE_UP_AGAIN_S", 0.001)
    answer, often = list[int](), threading.Event()

    def give_up() -> None:
        answer.append(1)
        if len(answer) == 3:
            often.set()

    limit = ConfirmationLimit(0.0)
    with limit.enforced(give_up):
        assert often.wait(60)
    assert limit.is_over


@pytest.mark.parametrize(("wall", "blocks"), [(0.0, 1), (600.0, 12)])
def test_a_contest_ends_by_the_clock_however_short_its_launches_are(wall: float, blocks: int) -> None:
    rules = replace(THOROUGH_RULES, least=12, most=12, wall=wall)
    result, ended = HalvingRace(rules, random.Random(0)).time_winner(SimulatedPairedClock(1e-6))
    assert (len(result), ended) == (blocks, "budget")


@pytest.mark.parametrize(
    ("gain", "why"), [(-0.5, "hopeless"), (-0.1, "slower"), (0.1, "faster"), (0.0, "precise")]
)
def test_a_contest_ends_as_early_as_its_result_is_clear(gain: float, why: str) -> None:
    rules = replace(QUICK_RULES, precise=QUICK_RULES.precise if why == "precise" else 0.0)
    clock = SimulatedPairedClock(1e-3, gain, noise=0.005)
    result, ended = HalvingRace(rules, random.Random(0)).time_winner(clock)
    assert ended == why
    assert len(result) == rules.first if why == "hopeless" else rules.least <= len(result) < rules.most


class Lane:
    """Notes that it was closed."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_the_first_one_is_opened_before_anybody_asks() -> None:
    opened, result = threading.Event(), list[Lane]()

    def make() -> Lane:
        result.append(Lane())
        opened.set()
        return result[-1]

    lanes = EarlyOpener(make)
    assert opened.wait(60)
    assert [lanes(), lanes()] == result
    lanes.close()
    assert not any(one.closed for one in result)


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
