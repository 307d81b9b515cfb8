"""Spans and counters of this process. Nothing is done, and nothing loaded, unless an exporter was asked for.

Launches of a key that is decided come through here no more than through the rest of a decision: counting them
would cost every launch.
"""

from __future__ import annotations

import atexit
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from forecast_autotune.printable import LONGEST_NAME, printable
from forecast_autotune.telemetry.exporter import Attributes, AttributeValue, TelemetryExporter

Answer = TypeVar("Answer")


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
    """A span that exporters hear of."""

    def __init__(self, name: str, attributes: Mapping[str, object]) -> None:
        self._name, self._first = name, attributes
        self._later: dict[str, object] = {}
        self._tokens: list[tuple[TelemetryExporter, object]] = []

    def set(self, **attributes: object) -> None:
        self._later |= attributes

    def __enter__(self) -> Span:
        said = shown_attributes(self._first)
        for exporter in _state.exporters:
            self._tokens.append((exporter, _state.ask(exporter, exporter.begin, self._name, said)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._later.setdefault("outcome", kind.__name__)
        said = shown_attributes(self._later)
        for exporter, token in reversed(self._tokens):
            if exporter in _state.exporters:  # else it was closed, or failed, meanwhile
                _state.ask(exporter, exporter.end, token, said, kind is not None)


_HIDDEN_SPAN = Span()


_NOTHING: tuple[str, Path | None] = ("off", None)


class _Telemetry:
    """The exporters of this process, and what they were made for."""

    def __init__(self) -> None:
        self.exporters: tuple[TelemetryExporter, ...] = ()
        self._configured: tuple[str, Path | None] = _NOTHING
        self._ended = False
        self._mutex = threading.RLock()

    def configure(self, kind: str, trace: Path | None, at_once: bool) -> None:
        """See `configure`."""
        wanted = kind, trace
        if wanted in (self._configured, _NOTHING):
            return
        with self._mutex:
            if wanted == self._configured or self._ended:
                return
            self.close()
            self._configured = wanted
            made = []
            if trace is not None and (
                file := self._make(f"no trace is written to {trace}", _trace_file, trace, at_once)
            ):
                made.append(file)
            if kind == "otel" and (otel := self._make("nothing is told to OpenTelemetry", _open_telemetry)):
                made.append(otel)
            self.exporters = tuple(made)

    def close(self, *, for_good: bool = False) -> None:
        """Close every exporter; unless it is for good, the next `configure` may make new ones."""
        with self._mutex:
            old, self.exporters, self._configured, self._ended = self.exporters, (), _NOTHING, for_good
            for exporter in old:
                self._try(exporter.close)

    def ask(
        self, exporter: TelemetryExporter, call: Callable[..., Answer], *arguments: object
    ) -> Answer | None:
        """What the call gives; where it raises, a warning, and the exporter is heard of no more."""
        try:
            return call(*arguments)
        except Exception as error:
            with self._mutex:
                known = exporter in self.exporters
                self.exporters = tuple(e for e in self.exporters if e is not exporter)
            if known:
                self._try(exporter.close)
                _warn(f"{type(exporter).__name__} failed ({error!r:.300}): going on without it")
            return None

    @staticmethod
    def _try(close: Callable[[], None]) -> None:
        try:
            close()
        except Exception as error:
            _warn(f"telemetry could not be closed ({error!r:.300})")

    @staticmethod
    def _make(
        what: str, make: Callable[..., TelemetryExporter], *arguments: object
    ) -> TelemetryExporter | None:
        try:
            return make(*arguments)
        except Exception as error:
            _warn(f"{what}: {error}")
            return None


_state = _Telemetry()


def _warn(text: str) -> None:
    warnings.warn(printable(text), RuntimeWarning, stacklevel=5)


def _trace_file(path: Path, at_once: bool) -> TelemetryExporter:
    from forecast_autotune.telemetry.trace_file import TraceFile

    return TraceFile(path, at_once=at_once)


def _open_telemetry() -> TelemetryExporter:
    try:
        from forecast_autotune.telemetry.open_telemetry import OpenTelemetryExporter
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'forecast-autotune[telemetry]'") from error
    return OpenTelemetryExporter()


def configure(kind: str, trace: Path | None, *, at_once: bool = False) -> None:
    """Show spans and counters from now on: `kind` is "off" or "otel", `trace` a file to write.

    The file is begun with the first event, or `at_once`. Asked for the same again, or for nothing, it does nothing:
    decisions of one process may have settings that were read at other times. What cannot be had costs one warning.
    """
    _state.configure(kind, trace, at_once)


def close() -> None:
    """End a trace file, and tell nobody anything any more until `configure`."""
    _state.close()


# Exit handlers of the program that tune later must not begin the file anew.
atexit.register(_state.close, for_good=True)


def span(name: str, **attributes: object) -> Span:
    """A span to enter; one that does nothing unless somebody listens."""
    return _ShownSpan(name, attributes) if _state.exporters else _HIDDEN_SPAN


def record(name: str, lane: str, begin_s: float, end_s: float, **attributes: object) -> None:
    """Show a span of a child process that is over; seconds of `time.perf_counter`."""
    for exporter in _state.exporters:
        said = shown_attributes(attributes)
        _state.ask(exporter, exporter.record, name, lane, begin_s, max(begin_s, end_s), said)


def count(counter: str, amount: float, **attributes: object) -> None:
    """Add to a counter of `exporter.COUNTERS`."""
    for exporter in _state.exporters:
        _state.ask(exporter, exporter.count, counter, amount, shown_attributes(attributes))


def shown_attributes(attributes: Mapping[str, object]) -> Attributes:
    """Attributes as exporters get them: numbers and truth values as they are, all else as text of bounded length."""
    shown: dict[str, AttributeValue] = {}
    for name, value in attributes.items():
        if isinstance(value, bool | int | float):
            shown[name] = value
        elif value is not None:
            shown[name] = printable(value, LONGEST_NAME)
    return shown
