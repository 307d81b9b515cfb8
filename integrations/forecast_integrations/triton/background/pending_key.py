"""A key that is served by what was known when it was met, until its timing has ended."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, MutableMapping
from dataclasses import dataclass, field
from enum import Enum

from forecast_integrations.triton.background.arguments import WeakArguments
from forecast_integrations.triton.background.key_decision import KeyDecision, current_device_index
from forecast_integrations.triton.background.launch_series import LaunchSeries
from forecast_integrations.triton.problem.describe import call_form
from forecast_integrations.triton.protocols import Key, LaunchConfig


class KeyState(Enum):
    """Where a key stands."""

    WAITING = "waiting"
    """For its next launch, at which it is queued."""
    QUEUED = "queued"
    TUNING = "tuning"
    DONE = "done"
    """Its final config is installed at its next launch."""


_CAPTURE_S = 10.0
"""Seconds after which a capture that has launched a key counts as ended, if its thread has launched nothing since."""


@dataclass(frozen=True)
class PendingDecision:
    """A key whose timing has not ended, as `settle` reports it."""

    kernel: str
    key: Key
    reason: str
    """Why it has not."""


@dataclass(eq=False)
class PendingKey:
    """One key, as the thread that decides it and those that launch it share it."""

    decision: KeyDecision
    served_config: LaunchConfig
    siblings: MutableMapping[Key, PendingKey]
    """The pending keys of its tuner, itself among them until it is installed."""
    state: KeyState = KeyState.WAITING
    series: LaunchSeries | None = None
    """Launches that the deciding thread waits for."""
    final_config: LaunchConfig | None = None
    arguments: WeakArguments | None = None
    """Of its latest launch."""
    launched_at: float = field(default_factory=time.monotonic)
    """Its latest launch, by `time.monotonic`."""
    not_before: float = 0.0
    """When a launch may queue it again, by the same clock."""
    form: Hashable = ()
    """Of the call that it was met with (`call_form`): candidates are timed at calls of the same form."""
    attempts: int = 0
    captured_at: dict[int, float] = field(default_factory=dict)
    """When a thread has launched it inside a capture that may not have ended, by the thread's number."""
    is_unfit: bool = False
    """Whether candidates could not be timed at its latest launch: as if it had not been launched."""
    is_unwanted: bool = False
    """Whether the deciding thread is to put it off."""

    @property
    def is_pending(self) -> bool:
        """Whether it still decides what its key is launched with."""
        return self.siblings.get(self.decision.key) is self

    def current_config(self) -> LaunchConfig:
        """What launches have now: another thread may have installed the final config."""
        decision = self.decision
        return (
            self.served_config
            if self.is_pending
            else decision.tuner.cache.get(decision.key, self.served_config)
        )

    def is_captured(self) -> bool:
        """Whether some thread may be in the midst of a capture with launches of this key."""
        since = time.monotonic() - _CAPTURE_S
        return any(at > since for at in list(self.captured_at.values()))

    def why_untimed(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> str | None:
        """Why candidates cannot be timed at a launch with these arguments; None where they can."""
        decision = self.decision
        if current_device_index() != decision.device:
            return "it was launched on another device than the one that it is decided for"
        if call_form(decision.tuner.fn, args, kwargs) != self.form:
            return (
                "its latest arguments compile to other code than its first, or take another time: other sizes, dtypes, "
                "alignments, divisors or constants"
            )
        functions = decision.call.functions.values()
        if not all(getattr(one, "covers", lambda *_: True)(args, kwargs) for one in functions):
            return "its latest arguments are none that all of its variants were verified for"
        return None

    def install(self) -> LaunchConfig:
        """Launch with the final config from now on; to be called between launches."""
        assert self.final_config is not None
        decision = self.decision
        decision.tuner.cache[decision.key] = self.final_config
        self.siblings.pop(decision.key, None)
        return self.final_config

    def report(self, reason: str) -> PendingDecision:
        """What a user is told of it while it is pending."""
        return PendingDecision(self.decision.problem.kernel.name, self.decision.key, reason)
