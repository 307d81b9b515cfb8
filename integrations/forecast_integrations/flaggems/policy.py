"""A policy for FlagGems' `LibTuner`: it plans what to measure and measures it as our decorator does.

`LibTuner` overrides `Autotuner.run`, so that serving every `triton.autotune` of a process does not reach it. It asks
its class's `policy` for a decision: ours is registered under the name `forecast`, for
`libtuner(policy="forecast")`, and while it is enabled the tuners of the default policy, FlagGems' own operators
among them, decide through it as well. FlagGems still keeps what was decided, and every time, in its database, so
that it finds both again without us.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from forecast_autotune.errors import ForecastAutotuneError
from forecast_integrations.triton.engine import DecoratorOptions, TuningEngine

POLICY = "forecast"
"""The name that the policy is registered under."""
_DEFAULT = "default"
_NO_BENCHMARK = ("do_bench",)
"""Attributes of a tuner that name its own benchmark function."""

Policy = Callable[..., tuple[Any, dict[Any, Any]]]

_replaced: dict[type, Policy] = {}
"""FlagGems' own policies of the classes that decide through us."""


def enable_flaggems(options: DecoratorOptions | None = None) -> None:
    """Register the policy, and let the tuners of FlagGems' default policy decide by it. Calling it twice is harmless.

    Tuners that exist and those to come are reached alike. `options` are those of our decorator, for all of them.
    Raises `ImportError` where FlagGems is not installed, and `ForecastAutotuneError` where its `LibTuner` is not as
    this bridge knows it.
    """
    tuner_class = _tuner_class()
    decorator_options = options or DecoratorOptions()

    def policy(
        self: Any, fn: Callable[[Any], list[float]], configs: Iterable[Any], args: Any, kwargs: Any
    ) -> tuple[Any, dict[Any, Any]]:
        return _decide(self, list(configs), tuple(args), dict(kwargs), decorator_options)

    default = tuner_class.get(_DEFAULT)
    if default not in _replaced:
        _replaced[default] = default.policy
    default.policy = policy
    policy_class = type(
        "ForecastLibTuner", (tuner_class,), {"policy": policy, "__doc__": "Decides by forecast."}
    )
    tuner_class.register(POLICY)(policy_class)


def disable_flaggems() -> None:
    """Give FlagGems its own default policy back. Existing decisions stay."""
    while _replaced:
        owner, policy = _replaced.popitem()
        owner.policy = policy  # type: ignore[attr-defined]


def _tuner_class() -> Any:
    tuner_class = importlib.import_module("flag_gems.utils.libentry").LibTuner
    missing = [n for n in ("register", "get", "policy", "run", "get_key") if not hasattr(tuner_class, n)]
    if missing or _DEFAULT not in getattr(tuner_class, "_dispatch_table", {}):
        raise ForecastAutotuneError(
            f"FlagGems' LibTuner has no {', '.join(missing) or 'default policy'}: this bridge knows release 5.0"
        )
    return tuner_class


def _decide(
    tuner: Any, configs: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: DecoratorOptions
) -> tuple[Any, dict[Any, Any]]:
    """One decision: the config, and the times of those that were measured, as FlagGems has them."""
    engine: TuningEngine = tuner.__dict__.setdefault("_forecast_engine", TuningEngine(options))
    stand_in = _stand_in(tuner, configs)
    arguments = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    key = tuner.get_key({name: value for name, value in arguments.items() if name in tuner.arg_names})
    config = engine.resolve(stand_in, key, args, kwargs)
    timings = dict(getattr(stand_in, "configs_timings", {}) or {})
    _keep_times(tuner, key, timings)
    return config, timings or {config: [0.0, 0.0, 0.0]}


def _stand_in(tuner: Any, configs: list[Any]) -> Any:
    """A plain autotuner with the parts of a `LibTuner`: its kernel and hooks, the configs that it has pruned to.

    Without the benchmark function that `LibTuner` names for all of its tuners, so that times are taken our way; and
    without its table of decisions, which FlagGems fills itself.
    """
    from triton.runtime.autotuner import Autotuner

    stand_in = Autotuner.__new__(Autotuner)
    stand_in.__dict__.update({k: v for k, v in tuner.__dict__.items() if k not in _NO_BENCHMARK})
    stand_in.configs, stand_in.cache, stand_in._do_bench = configs, {}, None
    stand_in.early_config_prune = stand_in.perf_model = None
    return stand_in


def _keep_times(tuner: Any, key: Any, timings: dict[Any, Any]) -> None:
    """Put what was measured into FlagGems' own table. Never raises: a database that is locked costs no decision."""
    try:
        table = importlib.import_module("flag_gems.utils.libentry").libcache[tuner.benchmark_table_name, key]
        for config, times in timings.items():
            if all(0.0 < t < float("inf") for t in times):
                table[config] = tuple(times)
    except Exception as error:
        warnings.warn(f"FlagGems' table of times was not written ({error!r:.200})", stacklevel=2)
