"""Autotuning that measures only the configs a forecast is unsure about.

Importing this package loads neither torch nor triton; they load when a name that needs them is used.
"""

import os
from typing import TYPE_CHECKING, Any

from forecast_autotune.version import __version__ as __version__

if TYPE_CHECKING:  # editors jump to the source; at run time Triton loads on first use
    from forecast_autotune.errors import (
        CaptureError,
        DeviceLostError,
        ForecastAutotuneError,
        FrozenMissError,
        NoWorkingConfigError,
        PluginError,
        RecordError,
        SettingsError,
        StoreError,
        VariantError,
    )
    from forecast_autotune.policy import Policy
    from forecast_autotune.records import Decision, Measurement, Plan
    from forecast_autotune.settings import Budget, Mode, Settings
    from forecast_autotune.space import Space
    from forecast_autotune.store import Store
    from forecast_autotune.surrogates.protocol import Forecasts, Query, Surrogate
    from forecast_integrations.inductor.api import autoload_generated as autoload_generated
    from forecast_integrations.inductor.api import autoload_torch_compile as autoload_torch_compile
    from forecast_integrations.inductor.api import disable_torch_compile, enable_torch_compile
    from forecast_integrations.triton.decorator import ForecastAutotuner, autotune, forecast_autotune
    from forecast_integrations.triton.patch import patch_triton, unpatch_triton

__all__ = [
    "Budget",
    "CaptureError",
    "Decision",
    "DeviceLostError",
    "ForecastAutotuneError",
    "ForecastAutotuner",
    "Forecasts",
    "FrozenMissError",
    "Measurement",
    "Mode",
    "NoWorkingConfigError",
    "Plan",
    "PluginError",
    "Policy",
    "Query",
    "RecordError",
    "Settings",
    "SettingsError",
    "Space",
    "Store",
    "StoreError",
    "Surrogate",
    "VariantError",
    "autotune",
    "disable_torch_compile",
    "enable_torch_compile",
    "forecast_autotune",
    "patch_triton",
    "unpatch_triton",
]

_ERRORS = "forecast_autotune.errors"
_INDUCTOR = "forecast_integrations.inductor.api"
_DECORATOR = "forecast_integrations.triton.decorator"
_PATCH = "forecast_integrations.triton.patch"
_HOMES = {
    "Budget": "forecast_autotune.settings",
    "CaptureError": _ERRORS,
    "Decision": "forecast_autotune.records",
    "DeviceLostError": _ERRORS,
    "ForecastAutotuneError": _ERRORS,
    "ForecastAutotuner": _DECORATOR,
    "Forecasts": "forecast_autotune.surrogates.protocol",
    "FrozenMissError": _ERRORS,
    "Measurement": "forecast_autotune.records",
    "Mode": "forecast_autotune.settings",
    "NoWorkingConfigError": _ERRORS,
    "Plan": "forecast_autotune.records",
    "PluginError": _ERRORS,
    "Policy": "forecast_autotune.policy",
    "Query": "forecast_autotune.surrogates.protocol",
    "RecordError": _ERRORS,
    "Settings": "forecast_autotune.settings",
    "SettingsError": _ERRORS,
    "Space": "forecast_autotune.space",
    "Store": "forecast_autotune.store",
    "StoreError": _ERRORS,
    "Surrogate": "forecast_autotune.surrogates.protocol",
    "VariantError": _ERRORS,
    "autoload_generated": _INDUCTOR,
    "autoload_torch_compile": _INDUCTOR,
    "autotune": _DECORATOR,
    "disable_torch_compile": _INDUCTOR,
    "enable_torch_compile": _INDUCTOR,
    "forecast_autotune": _DECORATOR,
    "patch_triton": _PATCH,
    "unpatch_triton": _PATCH,
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if os.environ.get("FORECAST_AUTOTUNE", "") not in ("", "0"):
    from forecast_autotune.activate import install

    install()
