"""How much launch time timing may take."""

from __future__ import annotations

from forecast_integrations.triton.background.tuner import StallBudget


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_at_most_a_second_is_saved_up() -> None:
    clock = Clock()
    budget = StallBudget(clock)
    assert budget.left_ms(20.0) == 20.0
    clock.now += 1000.0
    assert budget.left_ms(20.0) == 20.0


def test_what_is_spent_comes_back_at_its_rate() -> None:
    clock = Clock()
    budget = StallBudget(clock)
    budget.charge(15.0)
    assert budget.left_ms(20.0) == 5.0
    clock.now += 0.5
    assert budget.left_ms(20.0) == 15.0


def test_a_launch_that_took_too_much_is_paid_back_first() -> None:
    clock = Clock()
    budget = StallBudget(clock)
    budget.charge(100.0)
    assert budget.left_ms(20.0) == -80.0
    clock.now += 4.0
    assert budget.left_ms(20.0) == 0.0
    clock.now += 1.0
    assert budget.left_ms(20.0) == 20.0


def test_no_rate_leaves_nothing() -> None:
    assert StallBudget(Clock()).left_ms(0.0) == 0.0
