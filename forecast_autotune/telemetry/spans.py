"""Spans and counters of this process. Nothing is done, and nothing loaded, unless OpenTelemetry was asked for.

Launches of a key that is decided come through here no more than through the rest of a decision: counting them
would cost every launch.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from forecast_autotune.errors import FrozenMissError
from forecast_autotune.printable import LONGEST_NAME, printable
from forecast_autotune.records import Decision, Evidence, Problem
from forecast_autotune.version import __version__

if TYPE_CHECKING:
    from forecast_autotune.settings import Settings

Answer = TypeVar("Answer")
AttributeValue = str | int | float | bool
Attributes = Mapping[str, AttributeValue]
COUNTERS = {
    "hits": "keys that were answered without a measurement",
    "misses": "keys that had to be decided",
    "measured": "candidates compiled and timed, or found failing",
    "seconds_saved": "estimated seconds that compiling the trusted candidates would have taken on top",
}
"""Every counter, with its description."""
_NAME = "forecast_autotune"


class OpenTelemetryExporter:
    """Tells the application's own providers, those that are set or will be; nothing is configured here.

    Raises `ImportError` without the extra `telemetry`.
    """

    def __init__(self) -> None:
        from opentelemetry import metrics, trace

        self._failed = trace.StatusCode.ERROR
        self._tracer = trace.get_tracer(_NAME, __version__)
        meter = metrics.get_meter(_NAME, __version__)
        self._counters: dict[str, Any] = {
            # Saved seconds may be negative.
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
                span.set_status(self._failed)
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


class Span:
    """A part of a decision, from `__enter__` to `__exit__`. This one is shown nowhere."""

    def set(self, **attributes: object) -> None:
        """Add attributes; None is left out. Numbers and truth values stay, all else becomes bounded text."""

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class _ShownSpan(Span):
    """A span that the exporter hears of."""

    def __init__(self, exporter: OpenTelemetryExporter, name: str, attributes: Mapping[str, object]) -> None:
        self._exporter, self._name, self._first = exporter, name, attributes
        self._later: dict[str, object] = {}

    def set(self, **attributes: object) -> None:
        self._later |= attributes

    def __enter__(self) -> Span:
        self._token = _state.ask(self._exporter.begin, self._name, shown_attributes(self._first))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._later.setdefault("outcome", kind.__name__)
        if _state.exporter is self._exporter:  # else it was closed, or failed, meanwhile
            _state.ask(self._exporter.end, self._token, shown_attributes(self._later), kind is not None)


_HIDDEN_SPAN = Span()


class _Telemetry:
    """The exporter of this process, if the settings ask for one."""

    def __init__(self) -> None:
        self.exporter: OpenTelemetryExporter | None = None
        self._configured = False
        self._mutex = threading.RLock()

    def configure(self, kind: str) -> None:
        """Show spans and counters from now on: `kind` is "off" or "otel".

        Asked for the same again, or for nothing, it does nothing: decisions of one process may have settings that were
        read at other times. Where the package is missing, that is one warning.
        """
        if kind == "off" or self._configured:
            return
        with self._mutex:
            if self._configured:
                return
            self._configured = True
            try:
                self.exporter = OpenTelemetryExporter()
            except ImportError as error:
                _warn(
                    f"nothing is told to OpenTelemetry: {error}: pip install 'forecast-autotune[telemetry]'"
                )
            except Exception as error:
                _warn(f"nothing is told to OpenTelemetry: {error}")

    def close(self) -> None:
        """Stop exporting until `configure`."""
        with self._mutex:
            self.exporter, self._configured = None, False

    def ask(self, call: Callable[..., Answer], *arguments: object) -> Answer | None:
        """Return the result of a call; where it raises, warn and stop exporting."""
        try:
            return call(*arguments)
        except Exception as error:
            with self._mutex:
                exporter, self.exporter = self.exporter, None
            if exporter is not None:
                _warn(f"{type(exporter).__name__} failed ({error!r:.300}): going on without it")
            return None


_state = _Telemetry()
configure, close = _state.configure, _state.close


def _warn(text: str) -> None:
    warnings.warn(printable(text), RuntimeWarning, stacklevel=5)


def span(name: str, **attributes: object) -> Span:
    """A span to enter; one that does nothing unless somebody listens."""
    exporter = _state.exporter
    return _HIDDEN_SPAN if exporter is None else _ShownSpan(exporter, name, attributes)


def record(name: str, lane: str, begin_s: float, end_s: float, **attributes: object) -> None:
    """Show a span of a child process that is over; seconds of `time.perf_counter`."""
    if (exporter := _state.exporter) is not None:
        _state.ask(exporter.record, name, lane, begin_s, max(begin_s, end_s), shown_attributes(attributes))


def count(counter: str, amount: float, **attributes: object) -> None:
    """Add to a counter of `COUNTERS`."""
    if (exporter := _state.exporter) is not None:
        _state.ask(exporter.count, counter, amount, shown_attributes(attributes))


def shown_attributes(attributes: Mapping[str, object]) -> Attributes:
    """Attributes as the exporter gets them: numbers and truth values as they are, all else as bounded text."""
    results: dict[str, AttributeValue] = {}
    for name, value in attributes.items():
        if isinstance(value, bool | int | float):
            results[name] = value
        elif value is not None:
            results[name] = printable(value, LONGEST_NAME)
    return results


class DecisionSpan:
    """A context around the decision of a problem; call `conclude` with the decision inside."""

    def __init__(self, problem: Problem, settings: Settings, *, met_now: bool = True) -> None:
        """Shown where the settings say. Unless a key is `met_now`, it was counted when it was."""
        configure(settings.telemetry)
        self._met_now = met_now
        self._labels = {"kernel": problem.kernel.name, "mode": str(settings.mode)}
        self._span = span("decide", **self._labels, key=" ".join(problem.key), device=problem.device.name)

    def conclude(self, decision: Decision) -> Decision:
        """Show and count the decision, and return it.

        Savings are those of the summary line, which only decisions that were made now have.
        """
        fields = {name: getattr(decision, name) for name in _SHOWN}
        self._span.set(**fields, outcome="decided", why="; ".join(decision.rounds[-1:]) or decision.reason)
        fresh = decision.evidence is Evidence.FORECAST or decision.measured > 0
        if self._met_now:
            count("misses" if fresh else "hits", 1, **self._labels)
        if not fresh:
            return decision
        self._span.set(seconds_saved=decision.saved_s)
        count("measured", decision.measured, **self._labels)
        count("seconds_saved", decision.saved_s, **self._labels)
        return decision

    def __enter__(self) -> DecisionSpan:
        self._span.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, FrozenMissError):
            count("misses", 1, **self._labels)
        self._span.__exit__(kind, error, trace)


_SHOWN = (
    *("evidence", "candidates", "measured", "known", "trusted", "refused"),
    *("chosen", "median_ms", "stated_risk"),
)
