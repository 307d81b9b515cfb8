"""`doctor`'s rows on the language model: what is configured, whether all of it is there, what it is worth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from forecast_autotune.commands.doctor import DoctorCheck
from forecast_autotune.errors import ForecastAutotuneError, SettingsError
from forecast_autotune.settings import Settings

MODEL_ROW, CALIBRATION_ROW = "language model", "language model's calibration"
VARIABLE = "FORECAST_AUTOTUNE_LLM"
NETWORK_S = 5.0
"""Most seconds that the server is waited for, with `--network`."""
_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
_WITHOUT = f"decisions are made without it: correct {VARIABLE}"
_CALIBRATE = f'forecast-autotune train calibrate-llm --llm "${VARIABLE}"'


def checks(settings: Settings, network: bool) -> Iterator[DoctorCheck]:
    """The rows. Nothing is loaded and no key shown. Without `network`, only a server of this machine is contacted.

    A model that is not there fails: `run` refuses it, and every decision of other programs goes without it.
    """
    if not settings.llm:
        yield DoctorCheck(MODEL_ROW, "ok", f"none: {VARIABLE} names one")
        return
    from forecast_autotune.llm.spec import SERVER_KINDS, parsed
    from forecast_integrations.models.factory import check, missing_packages, package_remedy

    try:
        spec = parsed(settings.llm)
    except SettingsError as error:
        yield DoctorCheck(MODEL_ROW, "fail", str(error), _WITHOUT)
        return
    is_server, what = spec.kind in SERVER_KINDS, f"{spec.kind}:{spec.location}"
    if is_server:
        what = f"{spec.options['model']} at {spec.location} ({spec.kind})"
    if missing := missing_packages(spec):
        detail = f"{what}; not installed: {', '.join(missing)}"
        yield DoctorCheck(MODEL_ROW, "warn", detail, package_remedy(spec))
    else:
        try:
            check(settings.llm, contact=network or urlsplit(spec.location).hostname in _LOOPBACK_HOSTS)
        except SettingsError as error:
            yield DoctorCheck(MODEL_ROW, "fail", f"{what}: {error}", _WITHOUT)
        else:
            if is_server and network:
                yield _server(what, spec.location, str(spec.options["model"]))
            else:
                yield DoctorCheck(
                    MODEL_ROW, "ok", f"{what}; not contacted: --network does" if is_server else what
                )
    has_weight = "weight" in spec.options or settings.llm_trust != "auto"
    yield _trust(settings) if has_weight else _calibration(settings)


def _server(what: str, place: str, model: str) -> DoctorCheck:
    """Whether a server takes the key, and serves the model, by its list."""
    from forecast_integrations.models.http.client import RequestRejected, ServerClient
    from forecast_integrations.models.http.limits import Deadline

    url = f"{place}/models"
    try:
        models, _ = ServerClient(place, attempts=1).ask(url, None, _model_names, deadline=Deadline(NETWORK_S))
    except RequestRejected as error:
        if error.status in (401, 403):
            remedy = "give its key in FORECAST_AUTOTUNE_LLM_KEY (or OPENAI_API_KEY)"
            return DoctorCheck(MODEL_ROW, "warn", f"{what}: HTTP {error.status}", remedy)
        if error.status in (404, 405, 501):  # it has no such route
            return DoctorCheck(MODEL_ROW, "ok", f"{what}: it answers, and lists no models")
        remedy = "wait for it, look at its log, or correct its address"
        return DoctorCheck(MODEL_ROW, "warn", f"{what}: {error}", remedy)
    except ForecastAutotuneError as error:
        return DoctorCheck(MODEL_ROW, "warn", f"{what}: {error}", "start the server, or correct its address")
    if models and model not in models:
        # Its names are its words, and a server may repeat the key.
        detail = f"{what}: it answers, but this is none of the {len(models)} models that it lists"
        return DoctorCheck(MODEL_ROW, "warn", detail, f"correct ?model=NAME: {place}/models lists the names")
    how = "it serves this model" if models else "it answers, and lists no models"
    return DoctorCheck(MODEL_ROW, "ok", f"{what}: {how}")


def _model_names(data: Any) -> list[str]:
    """Names of the models in an answer of `/models`; none where it is no such answer."""
    try:
        return [str(entry["id"])[:100] for entry in data["data"]]
    except (LookupError, TypeError):
        return []


def _trust(settings: Settings) -> DoctorCheck:
    if settings.llm_trust == "never":
        return DoctorCheck(
            CALIBRATION_ROW, "warn", f"{VARIABLE}_TRUST=never: it is not asked", f"unset {VARIABLE}_TRUST"
        )
    return DoctorCheck(CALIBRATION_ROW, "ok", "asked in every decision, whatever a calibration says")


def _calibration(settings: Settings) -> DoctorCheck:
    from forecast_autotune.llm.calibration import find_calibration
    from forecast_autotune.llm.prompt import FORECAST_VERSION
    from forecast_autotune.surrogates.factory import calibration_paths, open_backend

    try:
        name = open_backend(settings.llm, settings.cache_dir).name
        where = calibration_paths(settings.llm, name, settings.cache_dir)
        calibration = find_calibration(name, FORECAST_VERSION, where)
    except (ForecastAutotuneError, ImportError, OSError) as error:
        return DoctorCheck(CALIBRATION_ROW, "warn", str(error), _CALIBRATE)
    path = next((p for p in where if p.is_file()), None)
    if path is None:
        return DoctorCheck(
            CALIBRATION_ROW, "warn", "none: the model is not asked before it has one", _CALIBRATE
        )
    if not calibration.skilled:
        detail = f"{path}: no skill was found in it, so it is not asked"
        return DoctorCheck(CALIBRATION_ROW, "warn", detail, "train it: forecast-autotune train llm")
    where_to = ", ".join(calibration.scope.devices) or "any device"
    return DoctorCheck(
        CALIBRATION_ROW, "ok", f"{path}: saves {calibration.saved:.0%} of the measurements on {where_to}"
    )
