"""What a call gets where something of ours has failed: the key and the config that Triton would have chosen."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from forecast_integrations.triton.protocols import Key, LaunchConfig, NamedArguments, Tuner


def triton_key(tuner: Tuner, args: tuple[object, ...], kwargs: NamedArguments, error: Exception) -> Key:
    """The in-memory key of a call, made slowly as `triton.autotune` makes it."""
    _warn("key of a call", error, "using Triton's")
    named = {k: v for k, v in _named(tuner, args, kwargs).items() if k in tuner.arg_names}
    key = [named[name] for name in tuner.keys if name in named]
    return (*key, *(str(value.dtype) for value in named.values() if hasattr(value, "dtype")))


def triton_config(
    tuner: Tuner,
    key: Key,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    error: Exception,
    configs: Sequence[LaunchConfig],
) -> LaunchConfig:
    """Time `configs` with Triton's own benchmark and take the fastest; one alone is taken as it is.

    Also fills the tuner's public attributes. What the user's own hooks and functions raise is raised.
    """
    best, timed = configs[0], len(configs) > 1
    _warn(
        "tuner", error, "timing every config as triton.autotune does" if timed else "using the first config"
    )
    if timed:
        timings = {config: tuner._bench(*args, config=config, **kwargs) for config in configs}
        best = min(timings, key=timings.__getitem__)
        tuner.pre_hook({**_named(tuner, args, kwargs), **best.all_kwargs()}, reset_only=True)
        tuner.configs_timings = timings
    tuner.cache[key] = best
    return best


def _named(tuner: Tuner, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
    return {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}


def _warn(what: str, error: Exception, remedy: str) -> None:
    warnings.warn(f"the {what} failed ({error!r:.300}): {remedy}", stacklevel=3)
