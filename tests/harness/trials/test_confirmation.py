"""How long a confirmation may take, and that it is ended."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from forecast_harness.trials import confirmation as confirmation_limit
from forecast_harness.trials.confirmation import ConfirmationLimit
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
