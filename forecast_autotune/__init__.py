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
    from forecast_autotune.policy import Policy, RiskBounded, TuningState, WallTime, stated_risk
    from forecast_autotune.records import Candidate, Config, Decision, Evidence, Measurement, Outcome, Plan
    from forecast_autotune.records.table import Table, read_tables, write_tables
    from forecast_autotune.settings import Budget, Mode, Settings
    from forecast_autotune.space import Space
    from forecast_autotune.store import Store
    from forecast_autotune.surrogates.default import default_surrogate
    from forecast_autotune.surrogates.formula import AnalyticSurrogate
    from forecast_autotune.surrogates.protocol import Forecasts, Query, Surrogate
    from forecast_autotune.tuning.replays.replay import ReplayReport, replay, shipped_tables
    from forecast_integrations.api import (
        ForecastAutotuner,
        PendingDecision,
        allow_capture_misses,
        autotune,
        disable_torch_compile,
        enable_torch_compile,
        forecast_autotune,
        patch_triton,
        prepare,
        ready,
        settle,
        unpatch_triton,
    )
    from forecast_integrations.api import autoload_torch_compile as autoload_torch_compile

__all__ = [
    "AnalyticSurrogate",
    "Budget",
    "Candidate",
    "CaptureError",
    "Config",
    "Decision",
    "DeviceLostError",
    "Evidence",
    "ForecastAutotuneError",
    "ForecastAutotuner",
    "Forecasts",
    "FrozenMissError",
    "Measurement",
    "Mode",
    "NoWorkingConfigError",
    "Outcome",
    "PendingDecision",
    "Plan",
    "PluginError",
    "Policy",
    "Query",
    "RecordError",
    "ReplayReport",
    "RiskBounded",
    "Settings",
    "SettingsError",
    "Space",
    "Store",
    "StoreError",
    "Surrogate",
    "Table",
    "TuningState",
    "VariantError",
    "WallTime",
    "allow_capture_misses",
    "autotune",
    "default_surrogate",
    "disable_torch_compile",
    "enable_torch_compile",
    "forecast_autotune",
    "patch_triton",
    "prepare",
    "read_tables",
    "ready",
    "replay",
    "settle",
    "shipped_tables",
    "stated_risk",
    "unpatch_triton",
    "write_tables",
]

_HOMES = {
    name: home
    for home, names in {
        "forecast_autotune.errors": "CaptureError DeviceLostError ForecastAutotuneError FrozenMissError "
        "NoWorkingConfigError PluginError RecordError SettingsError StoreError VariantError",
        "forecast_autotune.policy": "Policy RiskBounded TuningState WallTime stated_risk",
        "forecast_autotune.records": "Candidate Config Decision Evidence Measurement Outcome Plan",
        "forecast_autotune.records.table": "Table read_tables write_tables",
        "forecast_autotune.settings": "Budget Mode Settings",
        "forecast_autotune.space": "Space",
        "forecast_autotune.store": "Store",
        "forecast_autotune.surrogates.default": "default_surrogate",
        "forecast_autotune.surrogates.formula": "AnalyticSurrogate",
        "forecast_autotune.surrogates.protocol": "Forecasts Query Surrogate",
        "forecast_autotune.tuning.replays.replay": "ReplayReport replay shipped_tables",
        "forecast_integrations.api": "ForecastAutotuner PendingDecision allow_capture_misses autotune "
        "autoload_torch_compile disable_torch_compile enable_torch_compile forecast_autotune patch_triton "
        "prepare ready settle unpatch_triton",
    }.items()
    for name in names.split()
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
