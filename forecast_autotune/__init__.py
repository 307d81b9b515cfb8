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
    from forecast_autotune.features.devices.assembler_options import with_assembler_options
    from forecast_autotune.policy import Policy, RiskBounded, TuningState, WallTime, stated_risk
    from forecast_autotune.ranges.robust import Robust
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
    "Robust",
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
    "replay",
    "settle",
    "shipped_tables",
    "stated_risk",
    "unpatch_triton",
    "with_assembler_options",
    "write_tables",
]

_ERRORS = "forecast_autotune.errors"
_INTEGRATIONS = "forecast_integrations.api"
_REPLAY = "forecast_autotune.tuning.replays.replay"
_TABLE = "forecast_autotune.records.table"
_HOMES = {
    "AnalyticSurrogate": "forecast_autotune.surrogates.formula",
    "Budget": "forecast_autotune.settings",
    "Candidate": "forecast_autotune.records",
    "CaptureError": _ERRORS,
    "Config": "forecast_autotune.records",
    "Decision": "forecast_autotune.records",
    "DeviceLostError": _ERRORS,
    "Evidence": "forecast_autotune.records",
    "ForecastAutotuneError": _ERRORS,
    "ForecastAutotuner": _INTEGRATIONS,
    "Forecasts": "forecast_autotune.surrogates.protocol",
    "FrozenMissError": _ERRORS,
    "Measurement": "forecast_autotune.records",
    "Mode": "forecast_autotune.settings",
    "NoWorkingConfigError": _ERRORS,
    "Outcome": "forecast_autotune.records",
    "PendingDecision": _INTEGRATIONS,
    "Plan": "forecast_autotune.records",
    "PluginError": _ERRORS,
    "Policy": "forecast_autotune.policy",
    "Query": "forecast_autotune.surrogates.protocol",
    "RecordError": _ERRORS,
    "ReplayReport": _REPLAY,
    "RiskBounded": "forecast_autotune.policy",
    "Robust": "forecast_autotune.ranges.robust",
    "Settings": "forecast_autotune.settings",
    "SettingsError": _ERRORS,
    "Space": "forecast_autotune.space",
    "Store": "forecast_autotune.store",
    "StoreError": _ERRORS,
    "Surrogate": "forecast_autotune.surrogates.protocol",
    "Table": _TABLE,
    "TuningState": "forecast_autotune.policy",
    "VariantError": _ERRORS,
    "WallTime": "forecast_autotune.policy",
    "allow_capture_misses": _INTEGRATIONS,
    "autoload_torch_compile": _INTEGRATIONS,
    "autotune": _INTEGRATIONS,
    "default_surrogate": "forecast_autotune.surrogates.default",
    "disable_torch_compile": _INTEGRATIONS,
    "enable_torch_compile": _INTEGRATIONS,
    "forecast_autotune": _INTEGRATIONS,
    "patch_triton": _INTEGRATIONS,
    "prepare": _INTEGRATIONS,
    "read_tables": _TABLE,
    "replay": _REPLAY,
    "settle": _INTEGRATIONS,
    "shipped_tables": _REPLAY,
    "stated_risk": "forecast_autotune.policy",
    "unpatch_triton": _INTEGRATIONS,
    "with_assembler_options": "forecast_autotune.features.devices.assembler_options",
    "write_tables": _TABLE,
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
