"""Any call that launches work on the current device, timed as the candidates of a tuned kernel are."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from forecast_autotune.records import Candidate, Config
from forecast_integrations.triton.timer.timers import LaunchTimer, TimedLaunch, record_call, recording_stream

_ONLY = Candidate(Config.of({}))
"""There is one call at a time."""
_LEAST_SHARE = 0.5
"""The share of a launch's time below which a replay has not done all that the launch does."""


@dataclass(frozen=True)
class CallTime:
    """How long a call keeps the device."""

    ms: float
    protocol: str
    host_bound: bool = False
    """Whether waits for the host are in it: the call cannot be queued as fast as the device runs."""
    recordable: bool = True
    """False if it was to be recorded as a graph and could not be."""


class _Calls:
    """`LaunchableCall`s without hooks."""

    def __init__(self) -> None:
        self.functions: dict[Candidate, Callable[[], object]] = {}

    def has_hooks(self, candidate: Candidate, /) -> bool:
        return False

    def run_before_hooks(self, candidate: Candidate, /) -> dict[str, object]:
        return {}

    def launcher(self, candidate: Candidate, /) -> Callable[[], object]:
        return self.functions[candidate]

    def launch_once(self, candidate: Candidate, /) -> None:
        self.functions[candidate]()

    def run_after_hook(self, full: dict[str, object], /) -> None:
        pass


class CallTimer(LaunchTimer):
    """Times one call after another. They have run before, and the device is awake.

    What a call launches has to go to the current stream, and that has to be `stream`: enter `on_stream` before
    calls are made that remember a stream.
    """

    def __init__(self) -> None:
        self._one = _Calls()
        super().__init__(self._one)
        self._may_record = self._recordable = True
        self.stream: Any = recording_stream(self._flush)
        """None where no call can be recorded on this device."""

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Makes `stream` the current one, between what is queued on the one that is and what will be."""
        home = self._interface.current_stream()
        self.stream.wait_stream(home)
        try:
            with self._interface.stream(self.stream):
                yield
        finally:
            home.wait_stream(self.stream)

    def time(self, call: Callable[[], object], best_ms: float, *, may_record: bool = True) -> CallTime:
        """Milliseconds of one call; few launches where it cannot be better than `best_ms`.

        Raises what the call raises, unless it does so only while it is recorded. Graphs are gone when it returns.
        """
        self._one.functions[_ONLY], self._flushes = call, 1
        self._may_record, self._recordable = may_record, True
        try:
            times = self.time_adaptively(_ONLY, best_ms)
            return CallTime(
                statistics.median(times),
                self.protocol_of(_ONLY),
                self.is_host_bound(_ONLY),
                self._recordable,
            )
        finally:
            self._recorded.clear()
            self._one.functions.clear()

    def _wake(self) -> None:
        pass

    def _record_ways(self, candidate: Candidate, *, between: bool = False) -> list[TimedLaunch] | None:
        if not self._may_record:
            return None
        ways = record_call(self._one.functions[_ONLY], self._flush, between=between)
        if ways and not self._does_all(ways):
            ways = None
        self._recordable = ways is not None
        return ways

    def _does_all(self, ways: list[TimedLaunch]) -> bool:
        """Whether replays take about as long as launches: what goes to another stream is not in them."""
        if self.is_host_bound(_ONLY):  # then launches say nothing
            return True
        (replayed,) = self._rounds([_ONLY], [ways], 1)
        return replayed[0] >= _LEAST_SHARE * self._estimates[_ONLY]
