"""The surrogate of the settings: the shipped one or the user's model, with or without a language model beside it."""

from __future__ import annotations

import warnings
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.settings import Settings, cache_directory
from forecast_autotune.surrogates.default import DefaultSurrogate, default_surrogate
from forecast_autotune.surrogates.protocol import Surrogate

if TYPE_CHECKING:
    from forecast_autotune.llm.backend import Backend
    from forecast_autotune.surrogates.language_model.ensemble import EnsembleSurrogate, Gate


def surrogate_for(settings: Settings) -> Surrogate:
    """The surrogate of a decision under these settings; the same object for the same settings.

    A language model with a wrong name, or out of reach, costs a warning and not the decision; every decision says why
    the model was not asked.
    """
    plain = default_surrogate(settings.model)
    if not settings.llm:
        return plain
    if settings.llm_trust == "never":
        return unasked_model(plain, settings.llm, "FORECAST_AUTOTUNE_LLM_TRUST=never")
    return _cached_ensemble(
        plain,
        settings.llm,
        settings.cache_dir,
        settings.llm_timeout_s,
        settings.worker_count(),
        settings.llm_trust,
    )


@lru_cache(maxsize=4)
def _cached_ensemble(
    plain: DefaultSurrogate, spec: str, cache: Path | None, timeout_s: float, workers: int, trust: str
) -> Surrogate:
    from forecast_autotune.llm.providers import provider

    try:
        provider().check(spec, contact=False)
        result = with_language_model(
            plain, spec, cache=cache, timeout_s=timeout_s, workers=workers, trust=trust
        )
    except (ForecastAutotuneError, ImportError) as error:
        warnings.warn(f"FORECAST_AUTOTUNE_LLM: {error}: deciding without it", stacklevel=3)
        return unasked_model(plain, spec, str(error))
    try:
        provider().check(spec)
    except ForecastAutotuneError as error:
        # The server may come up later: every decision asks it all the same.
        warnings.warn(f"FORECAST_AUTOTUNE_LLM: {error}: deciding without it until it answers", stacklevel=3)
    return result


@lru_cache(maxsize=4)
def unasked_model(plain: DefaultSurrogate, spec: str, why: str) -> Surrogate:
    """`plain`, with the reason in all its forecasts why the language model of a specification was not asked."""
    from forecast_autotune.llm.spec import shown_model
    from forecast_autotune.surrogates.language_model.ensemble import UnaskedModelSurrogate

    return UnaskedModelSurrogate(plain, shown_model(spec), why)


def with_language_model(
    plain: DefaultSurrogate,
    spec: str,
    *,
    cache: Path | None = None,
    timeout_s: float = 30.0,
    workers: int = 16,
    patient: bool = False,
    gate: Gate | None = None,
    backend: Backend | None = None,
    trust: str = "auto",
) -> EnsembleSurrogate:
    """`plain` with a language model beside it; nothing is loaded before its use.

    With `trust` "always", or a weight in `spec`, the model is asked and heard whatever its gate or calibration says.

    Its calibration is read from beside the adapter, else beside the model, else below the cache directory.
    `backend` answers in place of the one that `spec` names, under its name.
    Raises `SettingsError` for a bad specification and `RecordError` for a bad calibration.
    """
    from forecast_autotune.llm.calibration import find_calibration
    from forecast_autotune.llm.gate import decide_asking
    from forecast_autotune.llm.prompt import FORECAST_VERSION
    from forecast_autotune.llm.spec import parsed
    from forecast_autotune.surrogates.language_model.ensemble import EnsembleSurrogate, forced_trust
    from forecast_autotune.surrogates.language_model.surrogate import LLMSurrogate

    backend = backend or open_backend(spec, cache)
    calibration = find_calibration(
        backend.name, FORECAST_VERSION, calibration_paths(spec, backend.name, cache)
    )
    weight = parsed(spec).options.get("weight") if spec else None
    if trust == "always" or weight is not None:
        calibration, gate = forced_trust(calibration, weight)
    model = LLMSurrogate(backend, calibration, timeout_s=timeout_s)
    return EnsembleSurrogate(plain, model, workers=workers, patient=patient, gate=gate or decide_asking)


@lru_cache(maxsize=2)
def open_backend(spec: str, cache: Path | None = None) -> Backend:
    """The backend of a specification; one per process, as weights are large. Raises `SettingsError`."""
    from forecast_autotune.llm.providers import provider

    settings = Settings.from_environment().with_(cache_dir=cache)
    return provider().backend(spec, settings=settings)


def calibration_paths(spec: str, name: str, cache: Path | None) -> list[Path]:
    """Possible files of a model's calibration, the first of which counts."""
    from forecast_autotune.llm.calibration import FILE, calibration_path
    from forecast_autotune.llm.probe import model_folder
    from forecast_autotune.llm.spec import parsed

    model = parsed(spec)
    folders = [model_folder(folder) for folder in (model.options.get("adapter"), model.location) if folder]
    return [
        *(folder / FILE for folder in folders if folder.is_dir()),
        calibration_path(name, cache_directory(cache)),
    ]
