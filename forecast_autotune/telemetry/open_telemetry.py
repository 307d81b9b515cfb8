"""Spans and counters for OpenTelemetry: the application's own providers, of which nothing is configured here."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

from opentelemetry import metrics, trace

from forecast_autotune.telemetry.spans import COUNTERS, Attributes
from forecast_autotune.version import __version__

_NAME = "forecast_autotune"


class OpenTelemetryExporter:
    """Tells the providers that are set, or will be. Importing this module needs the extra `telemetry`."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer(_NAME, __version__)
        meter = metrics.get_meter(_NAME, __version__)
        self._counters: dict[str, Any] = {
            # What was saved may be less than nothing.
            name: (meter.create_up_down_counter if name == "seconds_saved" else meter.create_counter)(
                f"{_NAME}.{name}", unit="s" if name == "seconds_saved" else "1", description=what
            )
            for name, what in COUNTERS.items()
        }

    def begin(self, name: str, attributes: Attributes) -> object:
        """Begin a child of the span that is current in this thread, current until its end; returns its token."""
        manager: AbstractContextManager[Any] = self._tracer.start_as_current_span(
            f"{_NAME}.{name}",
            attributes=_prefixed(attributes),
            record_exception=False,
            set_status_on_exception=False,
        )
        return manager, manager.__enter__()

    def end(self, token: object, attributes: Attributes, failed: bool) -> None:
        """End the span of a token, with more attributes; `failed`: by an exception."""
        assert isinstance(token, tuple)
        manager, span = token
        try:
            span.set_attributes(_prefixed(attributes))
            if failed:
                span.set_status(trace.StatusCode.ERROR)
        finally:
            manager.__exit__(None, None, None)

    def record(self, name: str, lane: str, begin_s: float, end_s: float, attributes: Attributes) -> None:
        """Show a child of the current span that another process ended; seconds of `time.perf_counter`."""
        now, now_ns = time.perf_counter(), time.time_ns()
        began, ended = (now_ns - int(1e9 * (now - at)) for at in (begin_s, end_s))
        named = {**_prefixed(attributes), f"{_NAME}.lane": lane}
        self._tracer.start_span(f"{_NAME}.{name}", start_time=began, attributes=named).end(end_time=ended)

    def count(self, counter: str, amount: float, attributes: Attributes) -> None:
        """Add to one of `COUNTERS`."""
        self._counters[counter].add(amount, _prefixed(attributes))


def _prefixed(attributes: Attributes) -> dict[str, Any]:
    return {f"{_NAME}.{name}": value for name, value in attributes.items()}
