"""What a server may cost: the circuit breaker, and budgets of tokens, money and seconds."""

from __future__ import annotations

import time
from typing import Any

import pytest

from forecast_autotune.llm.backend import LLMError, Usage
from forecast_autotune.llm.parallel import run_parallel
from forecast_integrations.models.http.limits import (
    BudgetExceeded,
    CircuitBreaker,
    CircuitOpen,
    Deadline,
    SpendingLimits,
    TokenPrices,
    UsageLedger,
    breaker,
)
from forecast_integrations.models.http.transport import RequestRejected, Transport
from tests.integrations.models import faults
from tests.integrations.models.faults import ERROR, OK, saying, script
from tests.integrations.models.faulty_server import Fault, FaultyServer, ask, transport_to

pytestmark = pytest.mark.usefixtures("short_pauses")


class Clock:
    """A clock that is told the time."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


# --- the breaker ---


def test_the_breaker_opens_tries_once_and_closes() -> None:
    clock = Clock()
    it = CircuitBreaker("the server", failures=3, pause_s=10.0, clock=clock)
    for _ in range(3):
        it.admit()
        it.failed("HTTP 500")
    assert it.open
    with pytest.raises(CircuitOpen, match=r"the server failed 3 times in a row \(last: HTTP 500\).* in 10 s"):
        it.admit()
    clock.now += 10.5
    assert not it.open
    it.admit()
    with pytest.raises(CircuitOpen, match="once a request under way has answered"):
        it.admit()
    it.failed("HTTP 503")
    clock.now += 10.5
    with pytest.raises(CircuitOpen, match="in 10 s"):
        it.admit()  # the pause has doubled
    clock.now += 10.0
    it.admit()
    it.succeeded()
    assert not it.open
    for _ in range(2):
        it.admit()
        it.failed("again")
    it.admit()


def test_a_withdrawn_trial_leaves_the_door_open() -> None:
    clock = Clock()
    it = CircuitBreaker("it", failures=1, pause_s=1.0, clock=clock)
    it.failed("x")
    clock.now += 2.0
    it.admit()
    it.cancelled()
    it.admit()


def test_a_server_that_keeps_failing_is_left_alone() -> None:
    with FaultyServer(script(ERROR)) as server:
        shared = CircuitBreaker(server.url, failures=5, pause_s=60.0)
        it = transport_to(server, shared_breaker=shared, attempts=2)
        for _ in range(10):
            with pytest.raises(LLMError):
                ask(it)
        assert len(server.requests) == 5
        assert shared.open
        started = time.monotonic()
        with pytest.raises(CircuitOpen):
            ask(it, 30.0)
        assert time.monotonic() - started < 20.0


def test_refusals_of_a_request_do_not_open_the_breaker() -> None:
    with FaultyServer(script(saying({}, 400))) as server:
        shared = CircuitBreaker(server.url, failures=2)
        for _ in range(4):
            with pytest.raises(RequestRejected):
                ask(transport_to(server, shared_breaker=shared))
        assert not shared.open


def test_backends_of_one_server_share_a_breaker() -> None:
    assert Transport("http://a.example:1/v1").breaker is Transport("http://a.example:1/v2").breaker
    assert Transport("http://a.example:1/v1").breaker is not Transport("http://a.example:2/v1").breaker
    assert breaker("http://a.example:1") is Transport("http://a.example:1/v1").breaker


# --- budgets ---


def limited(server: FaultyServer, **limits: Any) -> Transport:
    return transport_to(server, limits=SpendingLimits(**limits), prices=TokenPrices(prompt=1.0, output=10.0))


def test_tokens_are_counted_and_limited() -> None:
    with FaultyServer(script(OK)) as server:
        it = limited(server, tokens=40)
        for _ in range(3):
            ask(it, expected=Usage(1, 10, 0, 2))
        assert it.ledger.spent.prompt_tokens == 30
        with pytest.raises(BudgetExceeded, match=r"12 tokens, and 36 of 40 are spent.*LLM_MAX_TOKENS"):
            ask(it, expected=Usage(1, 10, 0, 2))
        assert len(server.requests) == 3


def test_money_is_counted_and_limited() -> None:
    with FaultyServer(script(OK)) as server:
        it = limited(server, money=70e-6)
        found, usage = it.ask(f"{it.base}/x", {}, dict, deadline=Deadline(5.0), expected=Usage(1, 10, 0, 2))
        assert found["fine"]
        assert usage.money == pytest.approx((10 * 1.0 + 2 * 10.0) / 1e6)
        ask(it, expected=Usage(1, 10, 0, 2))
        with pytest.raises(BudgetExceeded, match="LLM_MAX_MONEY"):
            ask(it, expected=Usage(1, 10, 0, 2))
        assert it.ledger.spent.money == pytest.approx(60e-6)


def test_requests_side_by_side_cannot_overrun_a_limit_together() -> None:
    with FaultyServer(script(OK)) as server:
        it = limited(server, tokens=60)
        found = run_parallel([lambda: ask(it, expected=Usage(1, 10, 0, 2))] * 20, 8)
        assert sum(isinstance(r, dict) for r in found) == len(server.requests) == 5
        assert it.ledger.spent.prompt_tokens + it.ledger.spent.output_tokens == 60


def test_seconds_are_those_in_which_anything_was_under_way() -> None:
    clock = Clock()
    ledger = UsageLedger(clock)
    with ledger.reserve(Usage(), SpendingLimits()):
        clock.now += 1.0
        with ledger.reserve(Usage(), SpendingLimits()):
            clock.now += 2.0
        assert ledger.spent.seconds == 3.0
    clock.now += 50.0
    assert ledger.spent.seconds == 3.0
    with (
        pytest.raises(BudgetExceeded, match="LLM_MAX_SECONDS"),
        ledger.reserve(Usage(), SpendingLimits(seconds=3.0)),
    ):
        pass
    with ledger.reserve(Usage(), SpendingLimits(seconds=10.0)) as bill:
        assert bill.budget_s == 7.0


def test_the_budget_of_seconds_is_a_deadline_as_well() -> None:
    with FaultyServer(script(faults.stall)) as server:
        it = limited(server, seconds=0.3)
        started = time.monotonic()
        with pytest.raises(LLMError):
            ask(it, 20.0)
        assert time.monotonic() - started < 15.0
        with pytest.raises(BudgetExceeded):
            ask(it, 20.0)


@pytest.mark.parametrize(
    "usage",
    [
        None,
        [],
        {"prompt_tokens": -5, "completion_tokens": "2"},
        {"prompt_tokens": 1e400, "completion_tokens": True},
        {"prompt_tokens_details": 7},
    ],
)
def test_a_usage_that_cannot_be_is_replaced_by_what_was_expected(usage: Any) -> None:
    with FaultyServer(script(saying({"usage": usage}))) as server:
        it = transport_to(server)
        ask(it, expected=Usage(1, 10, 0, 2))
        spent = it.ledger.spent
    assert (spent.prompt_tokens, spent.cached_tokens, spent.output_tokens) == (10, 0, 2)


@pytest.mark.parametrize(
    ("fault", "charged"),
    [(faults.stall_in_body, 10), (faults.truncate, 10), (ERROR, 0), (saying({}, 429), 0)],
)
def test_work_that_was_perhaps_done_is_charged(fault: Fault, charged: int) -> None:
    with FaultyServer(script(fault)) as server:
        it = transport_to(server, attempts=1)
        with pytest.raises(LLMError):
            ask(it, 0.4, Usage(1, 10, 0, 2))
        assert it.ledger.spent.prompt_tokens == charged
