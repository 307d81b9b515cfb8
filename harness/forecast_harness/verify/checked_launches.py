"""How rare a fault may be that so many checked launches would have found; loads no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.json_fields import rounded

CONFIDENCE = 0.99
"""Probability with which a fault of the share that is stated would have been found."""


@dataclass(frozen=True)
class CheckedLaunches(
    Record,
    label="checked launches",
    order=("launches", "timed", "seconds", "found_share", "found_share_timed"),
    derived={
        "found_share": lambda checked: round(checked.found_share, 6),
        "found_share_timed": lambda checked: round(found_share(checked.timed), 6),
    },
):
    """Launches of one solution whose results were compared with the reference, and when that was.

    A launch that is not checked shows nothing, so a solution that fails in fewer launches than `found_share` may
    well have passed. A fault that has not begun within `seconds` of the import, or that comes at a certain time of
    the day or week alone, is not found by any number of launches.
    """

    launches: int = 0
    timed: int = 0
    """Of them, those that were timed like all others, with contents that the solution had never been given."""
    seconds: float = field(default=0.0, metadata=json_option(write=rounded(2)))
    """Wall seconds from the end of the import to the last check, in the process that lasted longest."""

    @property
    def found_share(self) -> float:
        """The least share of faulty launches that would have been found with 99 %; 1 for no launch."""
        return found_share(self.launches)

    def __add__(self, other: CheckedLaunches) -> CheckedLaunches:
        """Those of two processes together."""
        return CheckedLaunches(
            self.launches + other.launches, self.timed + other.timed, max(self.seconds, other.seconds)
        )

    def __str__(self) -> str:
        if not self.launches:
            return "checked no launch"
        said = (
            f"checked {self.launches} launches up to {self.seconds:.1f} s after the import: a fault in "
            f"{100 * self.found_share:.2g} % of launches would have been found with {CONFIDENCE:.0%}"
        )
        if not self.timed:
            return said
        return f"{said}; of timed launches, {self.timed} of them, in {100 * found_share(self.timed):.2g} %"


def found_share(launches: int, confidence: float = CONFIDENCE) -> float:
    """The share of launches in which a fault has to show, to be found in so many with this probability."""
    return 1.0 if launches <= 0 else 1.0 - (1.0 - confidence) ** (1.0 / launches)


def launches_needed(share: float, confidence: float = CONFIDENCE) -> int:
    """How many launches find a fault in this share of them with this probability: 459 for 1 % and 99 %."""
    return math.ceil(math.log(1.0 - confidence) / math.log(1.0 - share))
