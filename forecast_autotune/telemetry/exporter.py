"""What whoever shows spans and counters must offer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

AttributeValue = str | int | float | bool
Attributes = Mapping[str, AttributeValue]
COUNTERS = {
    "hits": "keys that were answered without a measurement",
    "misses": "keys that had to be decided",
    "measured": "candidates compiled and timed, or found failing",
    "seconds_saved": "predicted seconds that measuring every candidate would have taken on top",
}
"""Every counter, with what it counts."""


class TelemetryExporter(Protocol):
    """Shows spans and counters. Whatever it raises costs one warning, and the exporter."""

    def begin(self, name: str, attributes: Attributes) -> object:
        """A span of this thread begins, inside of those that are open; the token that ends it."""
        ...

    def end(self, token: object, attributes: Attributes, failed: bool) -> None:
        """The span of a token ends; `attributes` are added to it. `failed`: by an exception."""
        ...

    def record(self, name: str, lane: str, begin_s: float, end_s: float, attributes: Attributes) -> None:
        """A span of another process that is over: seconds of `time.perf_counter`. Spans of a lane may overlap."""
        ...

    def count(self, counter: str, amount: float, attributes: Attributes) -> None:
        """Add to one of `COUNTERS`."""
        ...

    def close(self) -> None:
        """Nothing comes any more."""
        ...
