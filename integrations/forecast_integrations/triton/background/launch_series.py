"""Timed launches that one thread wants and others make, a few before each launch of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from forecast_autotune.records import Candidate
from forecast_autotune.timing.recorded_launches import DeviceEvent
from forecast_integrations.triton.problem.call import KernelCall

_FLUSH_MS = 0.08
"""What flushing the L2 costs on a fast card."""

EventPair = tuple[DeviceEvent, DeviceEvent]


class LaunchSeries:
    """So many rounds of launches of some candidates in turns, each between two events.

    Nothing here waits for the device. `watch` is entered before a candidate's first launch ever, and left by
    whoever wants the series when it is over.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        rounds: int,
        *,
        flushes: int,
        costs_ms: Sequence[float | None],
        watch: Callable[[Candidate], AbstractContextManager[object]] | None = None,
    ) -> None:
        """`costs_ms` are what launches of the candidates probably take; None where nobody knows."""
        self.candidates, self.flushes = tuple(candidates), flushes
        self.slots: list[list[tuple[DeviceEvent, DeviceEvent, bool]]] = [[] for _ in candidates]
        """Per candidate, events around each launch and whether it came too late for the device."""
        self.error: Exception | None = None
        self.spans: list[tuple[EventPair, float]] = []
        """Events around what was launched in one go, and the milliseconds that were charged for it."""
        self._costs_ms, self._watch = tuple(costs_ms), watch
        self._total = rounds * len(self.candidates)
        self._made = 0
        self._watching = contextlib.ExitStack()

    @property
    def is_launched(self) -> bool:
        """Whether nothing is left to be launched."""
        return self._made >= self._total or self.error is not None

    def next_cost_ms(self) -> float | None:
        """What the next launch probably takes, with what precedes it; None where nobody knows."""
        cost = self._costs_ms[self._made % len(self.candidates)]
        return None if cost is None else cost + _FLUSH_MS * self.flushes

    def advance(
        self, call: KernelCall, flush: Callable[[], None], event: Callable[[], Any], most_ms: float
    ) -> float:
        """Launch as many as take `most_ms` milliseconds, at least one; returns what they probably take.

        After a launch whose cost nobody knows comes no other. An error of the candidate's, or of hooks, ends the
        series; anything else that interrupts it is raised, and the launch counts as not made.
        """
        expected = 0.0
        launches = [call.launcher(c) for c in self.candidates]
        try:
            while not self.is_launched:
                cost = self.next_cost_ms()
                if expected and (cost is None or expected + cost > most_ms):
                    break
                self._launch(call, launches, flush, event)
                expected += cost or 0.0
                if cost is None:
                    break
        except Exception as error:
            self.error = error
        return expected

    def _launch(
        self,
        call: KernelCall,
        launches: Sequence[Callable[[], object]],
        flush: Callable[[], None],
        event: Callable[[], Any],
    ) -> None:
        turn = self._made % len(self.candidates)
        candidate = self.candidates[turn]
        if self._watch is not None:
            self._watching.enter_context(self._watch(candidate))
        start, end = event(), event()
        full = call.run_before_hooks(candidate) if call.has_hooks(candidate) else None
        for _ in range(self.flushes):
            flush()
        start.record()
        try:
            launches[turn]()
        except Exception as error:
            if full is not None:
                call.run_after_hook(full, error)
            raise
        late = start.query()
        end.record()
        if full is not None:
            call.run_after_hook(full)
        self.slots[turn].append((start, end, late))
        self._made += 1

    def has_begun(self) -> bool:
        """Whether the device has come to the latest of the launches that were made in one go."""
        return bool(self.spans) and self.spans[-1][0][0].query()

    def is_over(self) -> bool:
        """Whether the device is done with all that was launched."""
        return all(end.query() for (_, end), _ in self.spans)

    def close(self) -> None:
        """Watch no longer."""
        self._watching.close()
