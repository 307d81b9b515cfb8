"""Kernels of other languages than Triton's: what such a kernel must offer, and how it is tuned."""

from forecast_autotune.languages.host_clock import HOST_CLOCK, timed_launches
from forecast_autotune.languages.measurer import LanguageMeasurer
from forecast_autotune.languages.protocol import LanguageKernel, RefusedConfigError
from forecast_autotune.languages.tune import TunedKernel, tune_language

__all__ = [
    "HOST_CLOCK",
    "LanguageKernel",
    "LanguageMeasurer",
    "RefusedConfigError",
    "TunedKernel",
    "timed_launches",
    "tune_language",
]
