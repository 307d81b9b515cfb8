"""`doctor`'s rows on the language model: what is configured, whether all of it is there, what it is worth."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from forecast_autotune.commands.doctor import DoctorCheck
from forecast_autotune.errors import ForecastAutotuneError, SettingsError
from forecast_autotune.settings import Settings

if TYPE_CHECKING:
    from forecast_autotune.llm.spec import ModelSpec

MODEL_ROW, KEY_ROW, CALIBRATION_ROW = "language model", "language model's key", "language model's calibration"
VARIABLE = "FORECAST_AUTOTUNE_LLM"
NETWORK_S = 5.0
"""Most seconds that the server is waited for, with `--network`."""
_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
_WITHOUT = f"decisions are made without it: correct {VARIABLE}"
_CALIBRATE = f'forecast-autotune train calibrate-llm --llm "${VARIABLE}"'


def checks(settings: Settings, network: bool) -> list[DoctorCheck]:
    """The rows; a specification that breaks the examination is a finding, not its end."""
    try:
        return list(language_model_checks(settings, network=network))
    except Exception as error:
        remedy = "decisions are made without it: correct FORECAST_AUTOTUNE_LLM"
        return [DoctorCheck(MODEL_ROW, "fail", f"{type(error).__name__}: {error}"[:300], remedy)]


def language_model_checks(settings: Settings, *, network: bool = False) -> Iterator[DoctorCheck]:
    """The rows. Nothing is loaded and no key shown. Without `network`, only a server of this machine is contacted.

    A model that is not there fails: `run` refuses it, and every decision of other programs goes without it.
    """
    if not settings.llm:
        yield DoctorCheck(MODEL_ROW, "ok", f"none: {VARIABLE} names one")
        return
    from forecast_autotune.llm.spec import SERVER_KINDS, parsed
    from forecast_integrations.models.factory import missing_packages, package_remedy

    try:
        spec = parsed(settings.llm)
    except SettingsError as error:
        yield DoctorCheck(MODEL_ROW, "fail", str(error), _WITHOUT)
        return
    served, missing = spec.kind in SERVER_KINDS, missing_packages(spec)
    what = (
        f"{spec.options['model']} at {spec.location} ({spec.kind})"
        if served
        else f"{spec.kind}:{spec.location}"
    )
    if missing:
        detail = f"{what}; not installed: {', '.join(missing)}"
        yield DoctorCheck(MODEL_ROW, "warn", detail, package_remedy(spec))
    elif absent := _absent(settings.llm, spec, network):
        yield DoctorCheck(MODEL_ROW, "fail", f"{what}: {absent}", _WITHOUT)
    elif served:
        yield _server(what, spec.location, str(spec.options["model"]), network)
    elif spec.kind == "recorded":
        yield DoctorCheck(MODEL_ROW, "ok", f"{what}: its answers can be read")
    else:
        yield _weights(what, spec.location, str(spec.options.get("adapter") or ""))
    if served:
        yield _key(spec.location)
    trusted = "weight" in spec.options or settings.llm_trust != "auto"
    yield _trust(settings) if trusted else _calibration(settings)


def _absent(text: str, spec: ModelSpec, network: bool) -> str:
    """Why the model is not there; empty if it is, or if nobody may ask."""
    from forecast_integrations.models.factory import check

    try:
        check(text, contact=network or urlsplit(spec.location).hostname in _LOOPBACK_HOSTS)
    except SettingsError as error:
        return str(error)
    return ""


def _server(what: str, place: str, model: str, network: bool) -> DoctorCheck:
    if not network:
        return DoctorCheck(MODEL_ROW, "ok", f"{what}; not contacted: --network does")
    from forecast_integrations.models.http.client import RequestRejected, ServerClient
    from forecast_integrations.models.http.limits import Deadline

    url = f"{place}/models"
    try:
        listed, _ = ServerClient(place, attempts=1).ask(url, None, _model_names, deadline=Deadline(NETWORK_S))
    except RequestRejected as error:
        if error.status in (401, 403):
            remedy = "give its key in FORECAST_AUTOTUNE_LLM_KEY (or OPENAI_API_KEY)"
            return DoctorCheck(MODEL_ROW, "warn", f"{what}: HTTP {error.status}", remedy)
        return DoctorCheck(MODEL_ROW, "ok", f"{what}: it answers (HTTP {error.status}), and lists no models")
    except ForecastAutotuneError as error:
        return DoctorCheck(MODEL_ROW, "warn", f"{what}: {error}", "start the server, or correct its address")
    if listed and model not in listed:
        # Its names are its words, and a server may repeat the key.
        detail = f"{what}: it answers, but this is none of the {len(listed)} models that it lists"
        return DoctorCheck(MODEL_ROW, "warn", detail, f"correct ?model=NAME: {place}/models lists the names")
    how = "it serves this model" if listed else "it answers, and lists no models"
    return DoctorCheck(MODEL_ROW, "ok", f"{what}: {how}")


def _model_names(data: Any) -> list[str]:
    """Names of the models in an answer of `/models`; none where it is no such answer."""
    try:
        return [str(entry["id"])[:100] for entry in data["data"]]
    except (LookupError, TypeError):
        return []


def _weights(what: str, place: str, adapter: str) -> DoctorCheck:
    """Weights of what `check` has found to be a folder with a config, or a name on the hub."""
    for name, part in ((place, "model"), (adapter, "adapter")):
        folder = Path(name).expanduser()
        if name and folder.is_dir() and not any(p.stat().st_size > 0 for p in folder.glob("*.safetensors")):
            remedy = "give a folder with weights as safetensors"
            return DoctorCheck(MODEL_ROW, "warn", f"{what}; {name} holds no {part}", remedy)
        if name and not folder.is_dir() and not _is_in_hub_cache(name):
            there = f"{what}; {name} is not in the hub's cache: it is fetched at its first use"
            return DoctorCheck(MODEL_ROW, "warn", there, f"fetch it beforehand: hf download {name}")
    return DoctorCheck(
        MODEL_ROW, "ok", f"{what}; {'weights are' if not adapter else 'weights and adapter are'} here"
    )


def _is_in_hub_cache(name: str) -> bool:
    """Whether the hub's cache has it; asks no network."""
    from forecast_integrations.models.transformers.loading import snapshot

    try:
        return any(Path(snapshot(name, fetch=False)).glob("*.safetensors"))
    except (OSError, ValueError, ImportError):
        return False


def _key(place: str) -> DoctorCheck:
    import os

    from forecast_integrations.models.http.keys import api_key_for

    names = ("FORECAST_AUTOTUNE_LLM_KEY", "OPENAI_API_KEY")
    name = next((n for n in names if os.environ.get(n, "").strip()), "")
    if not name:
        return DoctorCheck(
            KEY_ROW, "ok", f"none is set; a server that needs one gets it from {' or '.join(names)}"
        )
    try:
        sent = bool(api_key_for(urlsplit(place)))
    except ForecastAutotuneError as error:
        return DoctorCheck(KEY_ROW, "warn", str(error), f"correct {name}")
    return DoctorCheck(KEY_ROW, "ok", f"set by {name}{'' if sent else '; this server does not get it'}")


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
