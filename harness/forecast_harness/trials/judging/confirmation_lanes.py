"""Fresh lanes of a kernel's confirmation, opened side by side before they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from forecast_harness.sandbox.api import SandboxError, SandboxLane
from forecast_harness.sandbox.lane_pools import close_lanes
from forecast_harness.trials.judging.early_opener import EarlyOpener
from forecast_harness.trials.protocol import LaneFailure


@dataclass
class ConfirmationLanes:
    """Lanes that no candidate has run in."""

    verifying: list[SandboxLane]
    """The first for the first kind of call; others for other kinds, as far as they could be opened."""
    racing: list[SandboxLane]
    """One for each contest that is made ready while a finalist is verified; without them one lane does it all."""

    def give_up(self) -> None:
        """End their jobs."""
        for lane in (*self.verifying, *self.racing):
            lane.give_up()

    def close(self) -> None:
        """End all of them."""
        close_lanes([*self.verifying, *self.racing])


class ConfirmationOpener:
    """Opens them in the background, once it is told to."""

    def __init__(self, open_lane: Callable[[], SandboxLane]) -> None:
        self._open_lane = open_lane
        self._verifying: list[EarlyOpener[SandboxLane]] = []
        self._racing: list[EarlyOpener[SandboxLane]] = []

    def prepare(self, verifying: int, racing: int) -> None:
        """Begin to open so many, unless some are being opened already."""
        if not self._verifying:
            self._verifying = [EarlyOpener(self._open_lane) for _ in range(verifying)]
            self._racing = [EarlyOpener(self._open_lane) for _ in range(racing)]

    def take(self) -> ConfirmationLanes:
        """Those that were prepared, or one alone. Raises `LaneFailure` where not even the first can be opened."""
        (first, *others), racing = self._verifying or [EarlyOpener(self._open_lane)], self._racing
        self._verifying, self._racing = [], []
        try:
            return ConfirmationLanes([first(), *_opened(others)], _opened(racing))
        finally:
            close_lanes([first, *others, *racing])

    def close(self) -> None:
        """Close those that nobody has asked for."""
        openers, self._verifying, self._racing = [*self._verifying, *self._racing], [], []
        close_lanes(openers)


def _opened(openers: list[EarlyOpener[SandboxLane]]) -> list[SandboxLane]:
    found = []
    for opener in openers:
        with suppress(LaneFailure, SandboxError):
            found.append(opener())
    return found
