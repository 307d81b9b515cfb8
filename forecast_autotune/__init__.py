"""Autotuning that measures only the configs a forecast is unsure about.

Importing this package loads neither torch nor triton; they load when a name that needs them is used.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # editors jump to the source; at run time Triton loads on first use
    from forecast_autotune.space import Space
    from forecast_integrations.inductor.api import autoload_generated as autoload_generated
    from forecast_integrations.inductor.api import autoload_torch_compile as autoload_torch_compile
    from forecast_integrations.inductor.api import disable_torch_compile, enable_torch_compile
    from forecast_integrations.patch import patch_triton, unpatch_triton
    from forecast_integrations.triton import ForecastAutotuner, autotune, forecast_autotune

__version__ = "0.1.0"
__all__ = [
    "ForecastAutotuner",
    "Space",
    "autotune",
    "disable_torch_compile",
    "enable_torch_compile",
    "forecast_autotune",
    "patch_triton",
    "unpatch_triton",
]

_HOMES = {
    "Space": "forecast_autotune.space",
    "ForecastAutotuner": "forecast_integrations.triton",
    "autotune": "forecast_integrations.triton",
    "forecast_autotune": "forecast_integrations.triton",
    "autoload_generated": "forecast_integrations.inductor.api",
    "autoload_torch_compile": "forecast_integrations.inductor.api",
    "disable_torch_compile": "forecast_integrations.inductor.api",
    "enable_torch_compile": "forecast_integrations.inductor.api",
    "patch_triton": "forecast_integrations.patch",
    "unpatch_triton": "forecast_integrations.patch",
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
