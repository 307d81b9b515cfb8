"""Every error a caller may want to catch: one root, one class per remedy; and whose an error is."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Iterator
from types import CodeType
from typing import Any

_OF_CALLER = "forecast_autotune_of_caller"
"""Attribute of an exception that a function of the caller's has raised in the middle of our work."""


class ForecastAutotuneError(Exception):
    """Root of all errors raised on purpose by this project."""


class RecordError(ForecastAutotuneError, ValueError):
    """A record or a table line that breaks a rule of the format."""


class NewerRecordError(RecordError):
    """A sound record that only a newer release can read: it is passed over, and kept."""


class SettingsError(ForecastAutotuneError, ValueError):
    """A setting (argument or FORECAST_AUTOTUNE_* variable) with a value outside its rule."""


class StoreError(ForecastAutotuneError):
    """The store cannot be read or written in the way that was asked for."""


class PluginError(ForecastAutotuneError, LookupError):
    """A part that another package should have registered is not there."""


class NoWorkingConfigError(ForecastAutotuneError, RuntimeError):
    """Every candidate that was tried failed; the message lists the outcomes."""

    config: Any = None
    """The config that the host tool would launch, or raise for; None where nothing may be launched again."""


class FrozenMissError(ForecastAutotuneError, LookupError):
    """Frozen mode met a problem the store holds no decision and no measurement for."""


class CaptureError(ForecastAutotuneError, RuntimeError):
    """A kernel would have to be tuned inside a CUDA-graph capture, where nothing can be timed."""


class VariantError(ForecastAutotuneError, RuntimeError):
    """A variant cannot be loaded, launched or verified; the base kernel is used in its place."""


class DeviceLostError(ForecastAutotuneError, RuntimeError):
    """A candidate hung or broke the device; nothing more can be launched in this process."""


def is_told_to_caller(error: Exception) -> bool:
    """Whether an error was raised so that the caller sees it: not a bug, nor a record or store that is broken.

    A warning is raised only where somebody has asked for that.
    """
    deliberate = isinstance(error, ForecastAutotuneError) and not isinstance(error, RecordError | StoreError)
    return deliberate or isinstance(error, Warning) or is_of_caller(error)


@contextlib.contextmanager
def function_of_caller() -> Iterator[None]:
    """Around a hook or another function that the caller has given us: its errors are for the caller to see."""
    try:
        yield
    except Exception as error:
        mark_of_caller(error)
        raise


def mark_of_caller(error: BaseException) -> None:
    """Let `is_of_caller` know this error again; one that takes no attributes is not known again."""
    with contextlib.suppress(AttributeError, TypeError):
        setattr(error, _OF_CALLER, True)


def is_of_caller(error: BaseException) -> bool:
    """Whether a function of the caller's has raised it: one that we were given, or a handler of signals."""
    return bool(getattr(error, _OF_CALLER, False)) or is_from_signal_handler(error)


def is_from_signal_handler(error: BaseException) -> bool:
    """Whether it comes from a signal handler of the program's, which limits the time of whatever runs, say."""
    handlers = {code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    return not codes_in_traceback(error).isdisjoint(handlers)


def codes_in_traceback(error: BaseException) -> set[CodeType]:
    """The code of every function that an error has come through."""
    results: set[CodeType] = set()
    traceback = error.__traceback__
    while traceback is not None:
        results.add(traceback.tb_frame.f_code)
        traceback = traceback.tb_next
    return results


def code_of(function: Any) -> CodeType | None:
    """The code that runs when this is called; None for a callable that is not written in Python."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None and callable(function):
        code = getattr(type(function).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None
