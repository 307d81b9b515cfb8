"""From FORECAST_AUTOTUNE_LLM to a model that can be asked, or that writes; `spec.FORMS` shows the forms."""

from __future__ import annotations

from dataclasses import replace

from forecast_autotune.errors import SettingsError
from forecast_autotune.llm.backend import Backend
from forecast_autotune.llm.providers import WRITING_S, answers_directory
from forecast_autotune.llm.spec import Spec, parsed
from forecast_autotune.llm.writers import Told, Writer, untold
from forecast_autotune.settings import Settings
from forecast_integrations.models.cache import Cached
from forecast_integrations.models.http import writing
from forecast_integrations.models.http.chat import Chat
from forecast_integrations.models.http.completions import Completions
from forecast_integrations.models.http.decisions import SystemOne
from forecast_integrations.models.http.guards import Limits, Prices
from forecast_integrations.models.http.transport import Transport
from forecast_integrations.models.transformers.loading import Source
from forecast_integrations.models.transformers.writer import Local


def backend(text: str, *, settings: Settings | None = None, cached: bool = True) -> Backend:
    """The backend that a specification names; nothing is loaded, and no server asked, before its use.

    Budgets come from `settings` (by default the environment's), and with `cached` a server's answers are
    kept below its cache directory. Raises `SettingsError` for a specification that is not understood, or
    that holds a key.
    """
    spec, settings = parsed(text), settings or Settings.from_environment()
    if spec.kind == "transformers":
        from forecast_integrations.models.transformers.backend import Transformers

        return Transformers(spec.place, **spec.options)
    if spec.kind == "vllm":
        from forecast_integrations.models.vllm import VLLM

        return VLLM(spec.place, **spec.options)
    made = _served(spec, settings)
    return Cached(made, answers_directory(settings), salt=spec.place) if cached else made


def writer(
    text: str,
    *,
    settings: Settings | None = None,
    timeout_s: float = WRITING_S,
    told: Told = untold,
) -> Writer:
    """A function from (prompt, n) to up to n texts of the model that a specification names.

    The function raises `LLMError` when there is not a single text; `told` hears what its calls cost. Raises
    `SettingsError` as `backend` does, and for backends that do not generate.
    """
    spec, settings = parsed(text, writing=True), settings or Settings.from_environment()
    options = spec.only("temperature", "max_tokens")
    if spec.kind == "transformers":
        source = Source(spec.place, **spec.only("adapter", "device", "dtype"))
        return Local(source, timeout_s=timeout_s, told=told, **options)
    if spec.kind == "completions":
        return writing.completions(
            _transport(spec, settings), spec.options["model"], timeout_s, **options, told=told
        )
    if spec.kind == "chat":
        if "effort" not in spec.options:
            # Several texts of one prompt are only worth having if they differ.
            spec = replace(spec, options={"temperature": 1.0, **spec.options})
        return writing.chat(_chat(spec, _transport(spec, settings)), timeout_s, told=told)
    raise SettingsError(
        f"{spec.kind} does not generate text: use kind=chat, kind=completions or transformers:"
    )


def _transport(spec: Spec, settings: Settings) -> Transport:
    limits = Limits(settings.llm_max_tokens, settings.llm_max_money, settings.llm_max_seconds)
    prices = Prices(spec.options.get("price_prompt", 0.0), spec.options.get("price_output", 0.0))
    return Transport(spec.place, prices=prices, limits=limits, **spec.only("concurrency", "attempts"))


def _served(spec: Spec, settings: Settings) -> Chat | Completions | SystemOne:
    transport, model = _transport(spec, settings), spec.options["model"]
    if spec.kind == "chat":
        return _chat(spec, transport)
    batch = spec.only("batch")
    if spec.kind == "systemone":
        return SystemOne(spec.place, model, transport=transport, **batch)
    return Completions(spec.place, model, transport=transport, **batch)


def _chat(spec: Spec, transport: Transport) -> Chat:
    options = spec.only("batch", "samples", "temperature", "effort", "max_tokens")
    return Chat(spec.place, spec.options["model"], transport=transport, **options)
