"""Every error a caller may want to catch: one root, one class per remedy."""

from __future__ import annotations


class ForecastAutotuneError(Exception):
    """Root of all errors raised on purpose by this project."""


class RecordError(ForecastAutotuneError, ValueError):
    """A record or a table line that breaks a rule of the format."""


class SettingsError(ForecastAutotuneError, ValueError):
    """A setting (argument or FORECAST_AUTOTUNE_* variable) with a value outside its rule."""


class StoreError(ForecastAutotuneError):
    """The store cannot be read or written in the way that was asked for."""


class PluginError(ForecastAutotuneError, LookupError):
    """A part that another package should have registered is not there."""


class NoWorkingConfigError(ForecastAutotuneError, RuntimeError):
    """Every candidate that was tried failed; the message lists the outcomes."""


class FrozenMissError(ForecastAutotuneError, LookupError):
    """Frozen mode met a problem the store holds no decision and no measurement for."""


class CaptureError(ForecastAutotuneError, RuntimeError):
    """A kernel would have to be tuned inside a CUDA-graph capture, where nothing can be timed."""


class VariantError(ForecastAutotuneError, RuntimeError):
    """A variant cannot be loaded, launched or verified; the base kernel is used in its place."""


class DeviceLostError(ForecastAutotuneError, RuntimeError):
    """A candidate hung or broke the device; nothing more can be launched in this process."""


def is_told_to_caller(error: Exception) -> bool:
    """Whether an error was raised so that whoever called sees it: not a bug, nor a record or store that is broken.

    A warning is raised only where somebody has asked for that.
    """
    told = isinstance(error, ForecastAutotuneError) and not isinstance(error, RecordError | StoreError)
    return told or isinstance(error, Warning)
