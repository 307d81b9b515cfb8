"""What keeps a server from costing more than it may: deadline, circuit breaker, budget."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from forecast_autotune.llm.backend import LLMError, Usage

TimeSource = Callable[[], float]
_MAX_PAUSE_S = 600.0


class Deadline:
    """A point in time by which everything about one question has to be over."""

    def __init__(self, seconds: float, clock: TimeSource = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    @property
    def remaining_s(self) -> float:
        """Seconds until then; 0 when it has passed."""
        return max(0.0, self._end - self._clock())

    def capped_at(self, seconds: float) -> Deadline:
        """This deadline, or one in `seconds` from now if that comes first."""
        return self if self.remaining_s <= seconds else Deadline(seconds, self._clock)


class CircuitOpen(LLMError):
    """The server failed too often in a row and is left alone for a while."""


class CircuitBreaker:
    """Stops asking a server that keeps failing, and tries it again with one request after a pause.

    Opens after `failures` failures in a row. After `pause_s` one request is let through: its success
    closes the breaker, its failure doubles the pause, up to ten minutes.
    """

    def __init__(
        self, name: str, failures: int = 5, pause_s: float = 15.0, clock: TimeSource = time.monotonic
    ) -> None:
        self.name = name
        self._most = failures
        self._first_pause_s = self._pause_s = pause_s
        self._clock = clock
        self._mutex = threading.Lock()
        self._failed = 0
        self._until = 0.0
        self._trying = False
        self._reason = ""

    @property
    def open(self) -> bool:
        """Whether requests are refused at this moment."""
        with self._mutex:
            return self._failed >= self._most and (self._trying or self._clock() < self._until)

    def admit(self) -> None:
        """Take leave to send one request; `succeeded` or `failed` must follow. Raises `CircuitOpen`."""
        with self._mutex:
            if self._failed < self._most:
                return
            wait = self._until - self._clock()
            if self._trying or wait > 0:
                when = "once a request under way has answered" if self._trying else f"in {wait:.0f} s"
                raise CircuitOpen(
                    f"{self.name} failed {self._failed} times in a row (last: {self._reason}); "
                    f"it is tried again {when}"
                )
            self._trying = True

    def succeeded(self) -> None:
        """The server answered."""
        with self._mutex:
            self._failed, self._trying, self._pause_s = 0, False, self._first_pause_s

    def failed(self, reason: str) -> None:
        """The server did not answer, or not usably."""
        with self._mutex:
            if self._trying:
                self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
            self._trying = False
            self._failed += 1
            self._reason = reason
            if self._failed >= self._most:
                self._until = self._clock() + self._pause_s

    def cancelled(self) -> None:
        """The request was never sent, so nothing is known about the server."""
        with self._mutex:
            self._trying = False


_BREAKERS: dict[str, CircuitBreaker] = {}
_BREAKERS_MUTEX = threading.Lock()


def breaker(name: str) -> CircuitBreaker:
    """The breaker that all backends of this process share for one server."""
    with _BREAKERS_MUTEX:
        return _BREAKERS.setdefault(name, CircuitBreaker(name))


@dataclass(frozen=True)
class TokenPrices:
    """Money per million tokens, in any currency; 0 where it is free or not known."""

    prompt: float = 0.0
    output: float = 0.0

    def of(self, usage: Usage) -> Usage:
        """The usage with its money worked out."""
        spent = (usage.prompt_tokens * self.prompt + usage.output_tokens * self.output) / 1e6
        return replace(usage, money=spent)


@dataclass(frozen=True)
class SpendingLimits:
    """The most that this process may spend on language models. None means: no limit of this kind."""

    tokens: int | None = None
    """Prompt and output tokens together."""
    money: float | None = None
    """In the currency of the prices."""
    seconds: float | None = None
    """Wall seconds during which at least one request was under way."""


class BudgetExceeded(LLMError):
    """A request would cost more than is left of a budget."""


class UsageLedger:
    """What was spent, and what requests under way may still cost; one per process.

    A request first reserves what it is expected to cost, so that requests that run side by side cannot
    overrun a limit together; what it did cost replaces that afterwards.
    """

    def __init__(self, clock: TimeSource = time.monotonic) -> None:
        self._clock = clock
        self._mutex = threading.Lock()
        self._spent = Usage()
        self._reserved = Usage()
        self._busy_s = 0.0
        self._since = 0.0
        self._active = 0

    @property
    def spent(self) -> Usage:
        """What all requests so far have cost; `seconds` counts requests side by side once."""
        with self._mutex:
            return replace(self._spent, seconds=self._seconds())

    @contextmanager
    def reserve(self, expected: Usage, limits: SpendingLimits) -> Iterator[RequestCost]:
        """Around one request. Raises `BudgetExceeded` if `expected` does not fit into what is left."""
        with self._mutex:
            left_s = self._admit(expected, limits)
            self._reserved += expected
            if not self._active:
                self._since = self._clock()
            self._active += 1
        bill = RequestCost(left_s)
        try:
            yield bill
        finally:
            with self._mutex:
                self._active -= 1
                if not self._active:
                    self._busy_s += self._clock() - self._since
                self._reserved += _negated(expected)
                self._spent += replace(bill.cost, seconds=0.0)

    def _seconds(self) -> float:
        return self._busy_s + (self._clock() - self._since if self._active else 0.0)

    def _admit(self, expected: Usage, limits: SpendingLimits) -> float:
        used = self._spent + self._reserved
        tokens = used.prompt_tokens + used.output_tokens
        asked = expected.prompt_tokens + expected.output_tokens
        if limits.tokens is not None and tokens + asked > limits.tokens:
            raise BudgetExceeded(
                f"the request may need {asked} tokens, and {tokens} of {limits.tokens} are spent or "
                "promised: raise FORECAST_AUTOTUNE_LLM_MAX_TOKENS to ask more"
            )
        if limits.money is not None and used.money + expected.money > limits.money:
            raise BudgetExceeded(
                f"the request may cost {expected.money:.4g}, and {used.money:.4g} of {limits.money:g} is "
                "spent or promised: raise FORECAST_AUTOTUNE_LLM_MAX_MONEY to ask more"
            )
        if limits.seconds is None:
            return float("inf")
        left = limits.seconds - self._seconds()
        if left <= 0:
            raise BudgetExceeded(
                f"this process has waited {self._seconds():.1f} s for language models and may wait "
                f"{limits.seconds:g} s: raise FORECAST_AUTOTUNE_LLM_MAX_SECONDS to ask more"
            )
        return left


@dataclass
class RequestCost:
    """What one request costs; nothing until `cost` is set."""

    budget_s: float
    """Seconds that the budget leaves for it."""
    cost: Usage = Usage()


def _negated(usage: Usage) -> Usage:
    return Usage(*(-value for value in vars(usage).values()))


USAGE_LEDGER = UsageLedger()
"""The ledger of this process."""
