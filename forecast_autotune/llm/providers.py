"""Language models by specification: what a provider offers, and the one that is registered.

Backends need torch, vLLM or a network, so they live in other packages and are found as the entry `default`
of the group `forecast_autotune.models`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from forecast_autotune import plugins
from forecast_autotune.llm.backend import Backend, TextGenerator, UsageCallback, ignore_usage
from forecast_autotune.settings import Settings, cache_directory

GROUP = "forecast_autotune.models"
GENERATION_TIMEOUT_S = 300.0
"""Default time limit of one call of a writer."""


class Provider(Protocol):
    """Opens models; nothing is loaded, and no server asked, before a model is used."""

    def backend(self, text: str, *, settings: Settings | None = None) -> Backend:
        """The backend that a specification names. Raises `SettingsError`."""
        ...

    def text_generator(
        self,
        text: str,
        *,
        settings: Settings | None = None,
        timeout_s: float = GENERATION_TIMEOUT_S,
        on_usage: UsageCallback = ignore_usage,
    ) -> TextGenerator:
        """A function from (prompt, n) to up to n texts. Raises `SettingsError`."""
        ...

    def model_name(self, text: str) -> str:
        """The model that a specification names, for the record of what it writes: no address, never a key."""
        ...

    def check(self, text: str, *, contact: bool = True) -> None:
        """Raises `SettingsError` where the model that a specification names is not there.

        With `contact`, a server must take a connection, too.
        """
        ...


def provider() -> Provider:
    """The registered provider. Raises `PluginError` where there is none."""
    result: Provider = plugins.load(GROUP, "default")
    return result


def answers_directory(settings: Settings) -> Path:
    """Where answers of models are kept: `llm` below the cache directory."""
    return cache_directory(settings.cache_dir) / "llm"
