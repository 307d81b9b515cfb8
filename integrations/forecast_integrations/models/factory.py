"""From FORECAST_AUTOTUNE_LLM to a model that can be asked, or that writes; `spec.FORMS` shows the forms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from forecast_autotune.errors import SettingsError
from forecast_autotune.llm.backend import Backend
from forecast_autotune.llm.providers import GENERATION_TIMEOUT_S, answers_directory
from forecast_autotune.llm.spec import ModelSpec, parsed
from forecast_autotune.llm.writers import TextGenerator, UsageCallback, ignore_usage
from forecast_autotune.settings import Settings
from forecast_integrations.models.cache import CachingBackend
from forecast_integrations.models.http import generation
from forecast_integrations.models.http.chat import ChatBackend
from forecast_integrations.models.http.completions import CompletionsBackend
from forecast_integrations.models.http.decisions import SystemOneBackend
from forecast_integrations.models.http.limits import SpendingLimits, TokenPrices
from forecast_integrations.models.http.transport import Transport
from forecast_integrations.models.presence import check as check
from forecast_integrations.models.recorded import RecordedAnswers, RecordedBackend, recorded_generator
from forecast_integrations.models.transformers.generation import LocalGenerator
from forecast_integrations.models.transformers.loading import ModelSource


def backend(text: str, *, settings: Settings | None = None, cached: bool = True) -> Backend:
    """The backend that a specification names; nothing is loaded, and no server asked, before its use.

    Budgets come from `settings` (by default the environment's), and with `cached` a server's answers are
    kept below its cache directory. Raises `SettingsError` for a specification that is not understood, or
    that holds a key.
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
    made = _open_http_backend(spec, settings)
    return CachingBackend(made, answers_directory(settings), salt=spec.location) if cached else made


def text_generator(
    text: str,
    *,
    settings: Settings | None = None,
    timeout_s: float = GENERATION_TIMEOUT_S,
    told: UsageCallback = ignore_usage,
) -> TextGenerator:
    """A function from (prompt, n) to up to n texts of the model that a specification names.

    The function raises `LLMError` when there is not a single text; `told` hears what its calls cost. Raises
    `SettingsError` as `backend` does, and for backends that do not generate.
    """
    spec, settings = parsed(text, writing=True), settings or Settings.from_environment()
    options = spec.given_options("temperature", "max_tokens")
    if spec.kind == "recorded":
        return recorded_generator(spec.location)
    if spec.kind == "transformers":
        source = ModelSource(spec.location, **spec.given_options("adapter", "device", "dtype"))
        return LocalGenerator(source, timeout_s=timeout_s, told=told, **options)
    if spec.kind == "completions":
        return generation.completions_generator(
            _open_transport(spec, settings), spec.options["model"], timeout_s, **options, told=told
        )
    if spec.kind == "chat":
        if "effort" not in spec.options:
            # Several texts of one prompt are only worth having if they differ.
            spec = replace(spec, options={"temperature": 1.0, **spec.options})
        return generation.chat_generator(
            _open_chat(spec, _open_transport(spec, settings)), timeout_s, told=told
        )
    raise SettingsError(
        f"{spec.kind} does not generate text: use kind=chat, kind=completions, transformers: or recorded:"
    )


def model_name(text: str) -> str:
    """The model of a specification: without a server's address, and never with a key.

    Raises `SettingsError` as `backend` does; of a file of recorded answers, its first line says who gave them.
    """
    spec = parsed(text, writing=True)
    if spec.kind == "recorded":
        return RecordedAnswers.read(spec.location).model
    return str(spec.options.get("model") or Path(spec.location).name)


def _open_transport(spec: ModelSpec, settings: Settings) -> Transport:
    limits = SpendingLimits(settings.llm_max_tokens, settings.llm_max_money, settings.llm_max_seconds)
    prices = TokenPrices(spec.options.get("price_prompt", 0.0), spec.options.get("price_output", 0.0))
    return Transport(
        spec.location, prices=prices, limits=limits, **spec.given_options("concurrency", "attempts")
    )


def _open_http_backend(
    spec: ModelSpec, settings: Settings
) -> ChatBackend | CompletionsBackend | SystemOneBackend:
    transport, model = _open_transport(spec, settings), spec.options["model"]
    if spec.kind == "chat":
        return _open_chat(spec, transport)
    batch = spec.given_options("batch")
    if spec.kind == "systemone":
        return SystemOneBackend(spec.location, model, transport=transport, **batch)
    return CompletionsBackend(spec.location, model, transport=transport, **batch)


def _open_chat(spec: ModelSpec, transport: Transport) -> ChatBackend:
    options = spec.given_options("batch", "samples", "temperature", "effort", "max_tokens")
    return ChatBackend(spec.location, spec.options["model"], transport=transport, **options)
