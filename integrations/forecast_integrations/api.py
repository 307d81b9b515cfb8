"""The public names of this package: `forecast_autotune` hands them on, and knows no other module in here.

Importing this module loads nothing: Triton, and what serves torch.compile, load with the first name that needs them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forecast_integrations.inductor.api import autoload_torch_compile as autoload_torch_compile
    from forecast_integrations.inductor.api import disable_torch_compile as disable_torch_compile
    from forecast_integrations.inductor.api import enable_torch_compile as enable_torch_compile
    from forecast_integrations.triton.background.tuner import PendingDecision as PendingDecision
    from forecast_integrations.triton.background.tuner import settle as settle
    from forecast_integrations.triton.decorator import ForecastAutotuner as ForecastAutotuner
    from forecast_integrations.triton.decorator import autotune as autotune
    from forecast_integrations.triton.decorator import forecast_autotune as forecast_autotune
    from forecast_integrations.triton.device_access import allow_capture_misses as allow_capture_misses
    from forecast_integrations.triton.patch import patch_triton as patch_triton
    from forecast_integrations.triton.patch import unpatch_triton as unpatch_triton
    from forecast_integrations.triton.prepare import prepare as prepare
    from forecast_integrations.triton.problem.compilations import ready as ready
else:  # type checkers must not see __getattr__: it would make an Any of a misspelt name
    _INDUCTOR = "forecast_integrations.inductor.api"
    _DECORATOR = "forecast_integrations.triton.decorator"
    _PATCH = "forecast_integrations.triton.patch"
    _HOMES = {
        "ForecastAutotuner": _DECORATOR,
        "PendingDecision": "forecast_integrations.triton.background.tuner",
        "allow_capture_misses": "forecast_integrations.triton.device_access",
        "autoload_torch_compile": _INDUCTOR,
        "autotune": _DECORATOR,
        "disable_torch_compile": _INDUCTOR,
        "enable_torch_compile": _INDUCTOR,
        "forecast_autotune": _DECORATOR,
        "patch_triton": _PATCH,
        "prepare": "forecast_integrations.triton.prepare",
        "ready": "forecast_integrations.triton.problem.compilations",
        "settle": "forecast_integrations.triton.background.tuner",
        "unpatch_triton": _PATCH,
    }

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})
