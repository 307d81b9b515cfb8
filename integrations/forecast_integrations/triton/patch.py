"""Zero-code adoption: serve every `triton.autotune` of a process, also those of libraries.

Triton's own `Autotuner.run` is served, by whomever it is called. That reaches tuners made before and after it, names
imported with `from triton import autotune`, and subclasses of libraries that call `super().run`; their type, their
attributes and their own overrides stay as they are, and so does whatever a framework has put in place of `run`.
"""

from __future__ import annotations

import os

from triton.runtime.autotuner import Autotuner

from forecast_autotune.records.program import RANK_FOLDER
from forecast_autotune.settings import Settings
from forecast_integrations.triton import upstream
from forecast_integrations.triton.compile.first_launch import COMPILER_HASH
from forecast_integrations.triton.decorator import ForecastAutotuner
from forecast_integrations.triton.engine import DecoratorOptions, TuningEngine, launch
from forecast_integrations.triton.problem.compilations import RECORDER
from forecast_integrations.triton.problem.key import KeyMaker
from forecast_integrations.triton.protocols import Tuner


def _launch(tuner: Tuner, *args: object, **kwargs: object) -> object:
    engine, make_key = tuner.__dict__.get("_forecast") or _adopt(tuner)
    return launch(tuner, engine, make_key, args, kwargs)


def _adopt(tuner: Tuner) -> tuple[TuningEngine, KeyMaker]:
    options = DecoratorOptions()
    parts = TuningEngine(options), KeyMaker(tuner.arg_names, options.settings().bucket)
    tuner.__dict__["_forecast"] = parts
    return parts


def tuning_parts(tuner: Tuner) -> tuple[TuningEngine, KeyMaker] | None:
    """Return the engine and the maker of this tuner's keys; None where Triton decides, as it is not patched."""
    if isinstance(tuner, ForecastAutotuner):
        return tuner.parts()
    return (tuner.__dict__.get("_forecast") or _adopt(tuner)) if upstream.is_served(Autotuner) else None


def patch_triton() -> None:
    """Serve every Triton autotuner in this process. Calling it twice changes nothing."""
    COMPILER_HASH.start_early()
    settings = Settings.from_environment()
    if settings.capture != "off":
        from forecast_integrations.triton.capture import start_capture

        start_capture()
    if settings.variants == "store":
        from forecast_integrations.triton.untuned import serve_untuned

        serve_untuned()
    if RANK_FOLDER in os.environ:
        from forecast_integrations.triton.program_recording import record_first_rank

        record_first_rank()
    RECORDER.start()
    upstream.serve(Autotuner, _launch)
    upstream.install()


def unpatch_triton() -> None:
    """Give Triton its own tuning back. Existing decisions stay."""
    upstream.serve(Autotuner, None)
    RECORDER.stop()
