"""An exporter that remembers what it was told, put in the place of OpenTelemetry."""

from __future__ import annotations

from typing import Any

from forecast_autotune.telemetry.spans import Attributes


class Recorder:
    """Finished spans as (name, attributes, name of the span around it), and sums of the counters."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, dict[str, Any], str]] = []
        self.counted: dict[str, float] = {}
        self.open: list[tuple[str, dict[str, Any]]] = []

    def begin(self, name: str, attributes: Attributes) -> object:
        self.open.append((name, dict(attributes)))
        return len(self.open)

    def end(self, token: object, attributes: Attributes, failed: bool) -> None:
        assert token == len(self.open), "spans end in the reverse order of their beginnings"
        name, first = self.open.pop()
        self.spans.append((name, {**first, **attributes, "failed": failed}, self.parent))

    def record(self, name: str, lane: str, begin_s: float, end_s: float, attributes: Attributes) -> None:
        assert begin_s <= end_s
        self.spans.append((name, {**attributes, "lane": lane}, self.parent))

    def count(self, counter: str, amount: float, attributes: Attributes) -> None:
        self.counted[counter] = self.counted.get(counter, 0) + amount

    @property
    def parent(self) -> str:
        """Name of the innermost span that is open."""
        return self.open[-1][0] if self.open else ""

    def named(self, name: str) -> list[dict[str, Any]]:
        """Attributes of the finished spans of this name."""
        return [attributes for result, attributes, _ in self.spans if result == name]
