"""Zero-code adoption: serve every `triton.autotune` of a process, also those of libraries.

The patch replaces `Autotuner.run` on the class. That reaches tuners made before and after it, names
imported with `from triton import autotune`, and subclasses of libraries that call `super().run`;
their type, their attributes and their own overrides stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable

from triton.runtime.autotuner import Autotuner

from forecast_autotune.settings import Settings
from forecast_integrations.triton.compile.first_launch import COMPILER_HASH
from forecast_integrations.triton.decorator import ForecastAutotuner
from forecast_integrations.triton.engine import DecoratorOptions, TuningEngine
from forecast_integrations.triton.problem.key import KeyMaker
from forecast_integrations.triton.protocols import Tuner
from forecast_integrations.triton.variants.loading import VariantConfig, launch_variant

_original: Callable[..., object] | None = None
_serving = False


def _run(self: Tuner, *args: object, **kwargs: object) -> object:
    if not _serving or isinstance(self, ForecastAutotuner):
        # Somebody wrapped this function: it was taken back since, or one of our own tuners obeys the
        # wrapper and must not be sent round in a circle.
        assert _original is not None  # as long as this function is in place
        return _original(self, *args, **kwargs)
    configs, key = self.configs, None
    if len(configs) > 1:
        engine, make_key = self.__dict__.get("_forecast") or _adopt(self)
        key = make_key(self.keys, args, kwargs)
        config = self.cache.get(key)
        if config is None:
            config = configs[0] if engine.is_deciding() else engine.resolve(self, key, args, kwargs)
    else:
        config = configs[0]
    try:
        if config.__class__ is VariantConfig:
            return launch_variant(self, config, args, kwargs)
        self.best_config = config
        if config.pre_hook is not None:
            config.pre_hook(
                {**dict(zip(self.arg_names, args, strict=False)), **kwargs, **config.all_kwargs()}
            )
        return self.fn.run(*args, **kwargs, **config.all_kwargs())
    except Exception as error:
        if key is None or not engine.strikes(self, key, config, error, args, kwargs):
            raise
    return _run(self, *args, **kwargs)


def _adopt(tuner: Tuner) -> tuple[TuningEngine, KeyMaker]:
    options = DecoratorOptions()
    parts = TuningEngine(options), KeyMaker(tuner.arg_names, options.settings().bucket)
    tuner.__dict__["_forecast"] = parts
    return parts


_run.forecast_autotune = True  # type: ignore[attr-defined]


def tuning_parts(tuner: Tuner) -> tuple[TuningEngine, KeyMaker] | None:
    """Return the engine and the maker of this tuner's keys; None where Triton decides, as it is not patched."""
    if isinstance(tuner, ForecastAutotuner):
        return tuner.parts()
    return (tuner.__dict__.get("_forecast") or _adopt(tuner)) if _serving else None


def patch_triton() -> None:
    """Serve every Triton autotuner in this process. Calling it twice changes nothing."""
    global _original, _serving
    _serving = True
    COMPILER_HASH.start_early()
    if Settings.from_environment().capture != "off":
        from forecast_integrations.triton.capture import start_capture

        start_capture()
    if _original is None:
        _original = Autotuner.run
        Autotuner.run = _run


def unpatch_triton() -> None:
    """Give Triton its own tuning back. Existing decisions stay."""
    global _original, _serving
    _serving = False
    if _original is not None and Autotuner.run is _run:
        Autotuner.run = _original
        _original = None
