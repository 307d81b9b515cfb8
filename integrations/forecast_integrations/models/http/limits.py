"""Limits of a server's cost: a deadline, and budgets of tokens, money and seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from forecast_autotune.llm.backend import LLMError, Usage

TimeSource = Callable[[], float]


class Deadline:
    """A point in time by which everything about one question has to be over."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining_s(self) -> float:
        """Seconds until then; 0 when it has passed."""
        return max(0.0, self._end - time.monotonic())


@dataclass(frozen=True)
class TokenPrices:
    """Money per million tokens, in any currency; 0 where it is free or not known."""

    prompt: float = 0.0
    output: float = 0.0

    def of(self, usage: Usage) -> Usage:
        """The usage with its money worked out."""
        money = (usage.prompt_tokens * self.prompt + usage.output_tokens * self.output) / 1e6
        return replace(usage, money=money)


@dataclass(frozen=True)
class SpendingLimits:
    """The most that this process may spend on language models. None means: no limit of this kind."""

    tokens: int | None = None
    """Prompt and output tokens together."""
    money: float | None = None
    """In the currency of the prices."""
    seconds: float | None = None
    """Wall seconds during which at least one request was under way."""


class ConnectionFailed(LLMError):
    """No whole reply has arrived, in time or at all."""


class BudgetExceeded(LLMError):
    """A request would cost more than is left of a budget."""


class UsageLedger:
    """Costs so far, and those that requests under way may still cause; one ledger per process.

    A request first reserves what it is expected to cost, so that requests that run side by side cannot
    overrun a limit together; the actual cost replaces that afterwards.
    """

    def __init__(self, clock: TimeSource = time.monotonic) -> None:
        self._clock = clock
        self._mutex = threading.Lock()
        self._cost = Usage()
        self._reservations = Usage()
        self._busy_s = 0.0
        self._since = 0.0
        self._active = 0

    @property
    def spent(self) -> Usage:
        """The cost of all requests so far; `seconds` counts requests side by side once."""
        with self._mutex:
            return replace(self._cost, seconds=self._seconds())

    @contextmanager
    def reserve(self, expected: Usage, limits: SpendingLimits) -> Iterator[RequestCost]:
        """Around one request. Raises `BudgetExceeded` if `expected` does not fit into what is left."""
        with self._mutex:
            left_s = self._admit(expected, limits)
            self._reservations += expected
            if not self._active:
                self._since = self._clock()
            self._active += 1
        request_cost = RequestCost(left_s)
        try:
            yield request_cost
        finally:
            with self._mutex:
                self._active -= 1
                if not self._active:
                    self._busy_s += self._clock() - self._since
                self._reservations += _negative(expected)
                self._cost += replace(request_cost.cost, seconds=0.0)

    def _seconds(self) -> float:
        return self._busy_s + (self._clock() - self._since if self._active else 0.0)

    def _admit(self, expected: Usage, limits: SpendingLimits) -> float:
        total = self._cost + self._reservations
        tokens = total.prompt_tokens + total.output_tokens
        request_tokens = expected.prompt_tokens + expected.output_tokens
        if limits.tokens is not None and tokens + request_tokens > limits.tokens:
            raise BudgetExceeded(
                f"the request may need {request_tokens} tokens, and {tokens} of {limits.tokens} are spent or "
                "promised: raise FORECAST_AUTOTUNE_LLM_MAX_TOKENS to ask more"
            )
        if limits.money is not None and total.money + expected.money > limits.money:
            raise BudgetExceeded(
                f"the request may cost {expected.money:.4g}, and {total.money:.4g} of {limits.money:g} is "
                "spent or promised: raise FORECAST_AUTOTUNE_LLM_MAX_MONEY to ask more"
            )
        if limits.seconds is None:
            return float("inf")
        left_s = limits.seconds - self._seconds()
        if left_s <= 0:
            raise BudgetExceeded(
                f"this process has waited {self._seconds():.1f} s for language models and may wait "
                f"{limits.seconds:g} s: raise FORECAST_AUTOTUNE_LLM_MAX_SECONDS to ask more"
            )
        return left_s


@dataclass
class RequestCost:
    """The cost of one request; nothing until `cost` is set."""

    budget_s: float
    """Seconds that the budget leaves for it."""
    cost: Usage = Usage()


def _negative(usage: Usage) -> Usage:
    return Usage(*(-value for value in vars(usage).values()))


USAGE_LEDGER = UsageLedger()
"""The ledger of this process."""
