"""From FORECAST_AUTOTUNE_LLM to a model that can be asked, or that writes; `SPEC_FORMS` shows the forms."""

from __future__ import annotations

import os
import socket
import urllib.request
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from forecast_autotune.commands.output import is_installed
from forecast_autotune.errors import SettingsError
from forecast_autotune.llm.backend import Backend, TextGenerator, UsageCallback, ignore_usage
from forecast_autotune.llm.probe import find_probe, model_folder
from forecast_autotune.llm.providers import GENERATION_TIMEOUT_S
from forecast_autotune.llm.spec import ModelSpec, parsed
from forecast_autotune.settings import Settings
from forecast_integrations.models.http.chat import ChatBackend, chat_generator
from forecast_integrations.models.http.client import ServerClient
from forecast_integrations.models.http.completions import CompletionsBackend, completions_generator
from forecast_integrations.models.http.limits import SpendingLimits, TokenPrices
from forecast_integrations.models.recorded import RecordedAnswers, RecordedBackend, recorded_generator

_PACKAGES = {
    "transformers": ("jinja2", "torch", "transformers", "safetensors"),
    "vllm": ("jinja2", "torch", "vllm"),
    "recorded": (),
}
"""Packages by kind of backend that runs here."""
_SERVER_PACKAGES = ("jinja2", "openai")
_REMEDIES = {
    "transformers": "pip install 'forecast-autotune[transformers]'",
    "vllm": "pip install 'forecast-autotune[vllm]', or a build for your device: https://docs.vllm.ai",
}
CONNECT_S = 3.0
"""Most seconds that a server is given to take a connection."""
_LOCAL_KINDS = ("transformers", "vllm")
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def backend(text: str, *, settings: Settings | None = None) -> Backend:
    """The backend that a specification names; nothing is loaded, and no server asked, before its use.

    Budgets come from `settings` (by default the environment's). Raises `SettingsError` for a specification that is
    not understood, or that holds a key.
    """
    spec, settings = parsed(text), settings or Settings.from_environment()
    if spec.kind == "transformers":
        from forecast_integrations.models.transformers.backend import TransformersBackend

        return TransformersBackend(spec.location, **spec.options)
    if spec.kind == "vllm":
        from forecast_integrations.models.vllm import VLLMBackend

        return VLLMBackend(spec.location, **spec.options)
    if spec.kind == "recorded":
        return RecordedBackend(spec.location, spec.options.get("open"))
    return _open_http_backend(spec, settings)


def text_generator(
    text: str,
    *,
    settings: Settings | None = None,
    timeout_s: float = GENERATION_TIMEOUT_S,
    on_usage: UsageCallback = ignore_usage,
) -> TextGenerator:
    """A function from (prompt, n) to up to n texts of the model that a specification names.

    The function raises `LLMError` when there is not a single text; `on_usage` hears what its calls cost. Raises
    `SettingsError` as `backend` does, and for backends that do not generate.
    """
    spec, settings = parsed(text, writing=True), settings or Settings.from_environment()
    options = spec.given_options("temperature", "max_tokens")
    if spec.kind == "recorded":
        return recorded_generator(spec.location)
    if spec.kind == "completions":
        return completions_generator(
            _open_client(spec, settings), spec.options["model"], timeout_s, **options, on_usage=on_usage
        )
    if spec.kind == "chat":
        if "effort" not in spec.options:
            # Several texts of one prompt are only worth having if they differ.
            spec = replace(spec, options={"temperature": 1.0, **spec.options})
        return chat_generator(_open_chat(spec, _open_client(spec, settings)), timeout_s, on_usage=on_usage)
    raise SettingsError(
        f"{spec.kind} does not generate text: serve the model and use kind=chat or kind=completions, or use recorded:"
    )


def model_name(text: str) -> str:
    """The model of a specification: without a server's address, and never with a key.

    Raises `SettingsError` as `backend` does; of a file of recorded answers, its first line says who gave them.
    """
    spec = parsed(text, writing=True)
    if spec.kind == "recorded":
        return RecordedAnswers.read(spec.location).model
    return str(spec.options.get("model") or Path(spec.location).name)


def _open_client(spec: ModelSpec, settings: Settings) -> ServerClient:
    limits = SpendingLimits(settings.llm_max_tokens, settings.llm_max_money, settings.llm_max_seconds)
    prices = TokenPrices(spec.options.get("price_prompt", 0.0), spec.options.get("price_output", 0.0))
    return ServerClient(
        spec.location, prices=prices, limits=limits, **spec.given_options("concurrency", "attempts")
    )


def _open_http_backend(spec: ModelSpec, settings: Settings) -> ChatBackend | CompletionsBackend:
    client, model = _open_client(spec, settings), spec.options["model"]
    if spec.kind == "chat":
        return _open_chat(spec, client)
    batch = spec.given_options("batch")
    # A server names a model by its folder, or an adapter by the name that it has here, too.
    assets = settings.assets / "adapters" / model if settings.assets else None
    return CompletionsBackend(spec.location, model, client=client, probe=find_probe(model, assets), **batch)


def _open_chat(spec: ModelSpec, client: ServerClient) -> ChatBackend:
    options = spec.given_options("batch", "temperature", "effort", "max_tokens")
    return ChatBackend(spec.location, spec.options["model"], client=client, **options)


# --- whether it is there ---


def check(text: str, *, contact: bool = True, connect_s: float = CONNECT_S) -> None:
    """Raises `SettingsError` where the model cannot be there: naming the rule, the value and the remedy.

    A folder must hold a model, a file of recorded answers must be one, and with `contact` a server must take a
    connection within `connect_s`. A name on the hub passes, as it is fetched at its first use, but not offline.
    """
    spec = parsed(text, writing=True)
    _check_packages(spec)
    if spec.kind == "recorded":
        RecordedAnswers.read(spec.location)
    elif spec.kind in _LOCAL_KINDS:
        _check_folder(spec.location, "model", "config.json")
        if adapter := str(spec.options.get("adapter") or ""):
            _check_folder(adapter, "adapter", "adapter_config.json")
    elif contact:
        _check_server(spec, connect_s)


def missing_packages(spec: ModelSpec) -> list[str]:
    """Packages that a model's kind needs and that are not installed; nothing is imported."""
    needed = _PACKAGES.get(spec.kind, _SERVER_PACKAGES)
    if spec.kind == "transformers" and spec.options.get("adapter"):
        needed = (*needed, "peft")
    return [name for name in needed if not is_installed(name)]


def package_remedy(spec: ModelSpec) -> str:
    """Return the remedy for packages that a model's kind needs."""
    return _REMEDIES.get(spec.kind, "pip install 'forecast-autotune[llm]'")


def _check_packages(spec: ModelSpec) -> None:
    if missing := missing_packages(spec):
        raise SettingsError(
            f"a language model of the kind {spec.kind} needs {' and '.join(missing)}, not installed here: "
            f"{package_remedy(spec)}"
        )


def _check_folder(name: str, part: str, config: str) -> None:
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / config).is_file():
            raise SettingsError(
                f"the folder of the {part} must hold {config}, and {name} does not: give the {part}'s folder"
            )
    elif folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise SettingsError(
            f"the {part} must be a folder or a name on the hub, and {name} does not exist: correct the path"
        )
    elif (
        any(os.environ.get(v, "") not in ("", "0") for v in _OFFLINE_VARIABLES)
        and not model_folder(name).is_dir()
    ):
        raise SettingsError(
            f"{name} is no folder and not in the hub's cache, and {' or '.join(_OFFLINE_VARIABLES)} forbids to "
            f"fetch it: give a folder, or fetch it beforehand (hf download {name})"
        )


def _check_server(spec: ModelSpec, connect_s: float) -> None:
    url = urlsplit(spec.location)
    host, port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
    if url.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return  # only the proxy knows
    try:
        socket.create_connection((host, port), timeout=connect_s).close()
    except OSError as error:
        raise SettingsError(
            f"a server must answer at its address, and {spec.location} does not ({error}): start the server, or "
            "correct the address"
        ) from None
