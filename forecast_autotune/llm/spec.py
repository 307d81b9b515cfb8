"""Values of FORECAST_AUTOTUNE_LLM: kind of backend, model, and options that are all known and checked."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from forecast_autotune.errors import SettingsError
from forecast_autotune.settings import Settings, count_within, number_within

SPEC_FORMS = """\
transformers:PATH_OR_ID[?adapter=PATH_OR_NAME&device=cuda&dtype=bfloat16], \
vllm:PATH_OR_ID[?adapter=PATH_OR_NAME&dtype=bfloat16&memory=0.3&length=8192], \
recorded:FILE[?weight=0.5&open=QUESTIONS.jsonl] or \
http(s)://HOST:PORT/v1?model=NAME[&kind=completions|chat&...]"""
SERVER_KINDS = ("completions", "chat")
_SECRET_OPTION = re.compile(
    r"key|secret|passw|credential|auth|^(access_|api_|bearer_)?token$|^bearer$", re.IGNORECASE
)
_SECRET_VALUE = re.compile(r"\b(?:sk-|gsk_|xai-|nvapi-|hf_|ghp_)[A-Za-z0-9_-]{20,}|\bBearer\b")
_WORD = re.compile(r"[a-z_]{1,24}")

_ADAPTERS_FOLDER = "adapters"
"""In the directory of FORECAST_AUTOTUNE_ASSETS: a folder per adapter, by its name."""

_OptionParser = Callable[[str], Any]


def _word(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


def _adapter(text: str) -> str:
    """A folder, a name on the hub (ORG/NAME), or a name that stands for a folder in FORECAST_AUTOTUNE_ASSETS."""
    path = Path(_word(text))
    if path.is_dir() or len(path.parts) > 1 or text.startswith(("~", ".")):
        return text
    assets = Settings.from_environment().assets
    folder = None if assets is None else assets / _ADAPTERS_FOLDER / text
    if folder is not None and (folder / "adapter_config.json").is_file():
        return str(folder)
    why = "FORECAST_AUTOTUNE_ASSETS is not set" if folder is None else f"there is no {folder}"
    raise ValueError(
        f"must be a folder, an adapter's name or ORG/NAME on the hub, and {text} is none of these ({why}): "
        "give the folder that `forecast-autotune train export` wrote, or set FORECAST_AUTOTUNE_ASSETS to a directory "
        "with adapters/NAME"
    )


_TRANSFORMERS_OPTIONS: dict[str, _OptionParser] = {"adapter": _adapter, "device": _word, "dtype": _word}
_VLLM_OPTIONS: dict[str, _OptionParser] = {
    "adapter": _adapter,
    "dtype": _word,
    "memory": number_within(0.01, 1.0),
    "length": count_within(16, 10**7),
}
_RECORDED_OPTIONS: dict[str, _OptionParser] = {"weight": number_within(0.01, 1.0), "open": _word}
_LOCAL_OPTIONS = {"transformers": _TRANSFORMERS_OPTIONS, "vllm": _VLLM_OPTIONS, "recorded": _RECORDED_OPTIONS}
"""Options by kind, of what is reached by a path or a name."""
_SERVER_OPTIONS: dict[str, _OptionParser] = {
    "model": _word,
    "kind": _word,
    "batch": count_within(1, 1024),
    "concurrency": count_within(1, 256),
    "attempts": count_within(1, 20),
    "price_prompt": number_within(0.0, 1e6),
    "price_output": number_within(0.0, 1e6),
}
_GENERATION_OPTIONS: dict[str, _OptionParser] = {
    "temperature": number_within(0.0, 2.0),
    "max_tokens": count_within(1, 10**6),
}
_CHAT_OPTIONS: dict[str, _OptionParser] = {**_GENERATION_OPTIONS, "effort": _word}


@dataclass(frozen=True)
class ModelSpec:
    """A parsed specification."""

    kind: str
    """transformers, vllm, recorded, completions or chat."""
    location: str
    """Folder or name of a model, a file of recorded answers, or the URL where a server's API starts."""
    options: Mapping[str, Any]
    """Parsed options, without `kind`."""

    @property
    def shown(self) -> str:
        """The name for people."""
        if self.kind in _LOCAL_OPTIONS:
            return f"{self.kind}:{self.location}"
        return f"{self.options['model']} at {self.location}"

    def given_options(self, *names: str) -> dict[str, Any]:
        """The options of these names that were given."""
        return {name: self.options[name] for name in names if name in self.options}


def parsed(text: str, *, writing: bool = False) -> ModelSpec:
    """Parse a specification; `writing` also allows what only matters for generated text.

    Raises `SettingsError` for a form that is not one of `SPEC_FORMS`, for unknown, repeated or bad options, and
    for anything that looks like a key: messages do not repeat what they complain of.
    """
    _refuse_secrets(text)
    place, _, query = text.strip().partition("?")
    scheme, _, location = place.partition(":")
    if scheme in ("http", "https"):
        return _parse_server(place, query, writing)
    if scheme not in _LOCAL_OPTIONS or not location:
        raise SettingsError(f"a language model is given as {SPEC_FORMS}; this is none of these")
    return ModelSpec(scheme, location, _parse_options(query, _LOCAL_OPTIONS[scheme], scheme))


def shown_model(text: str) -> str:
    """The name of a specification for people; empty for one that is refused, as it may hold a key."""
    try:
        return parsed(text).shown
    except SettingsError:
        return "FORECAST_AUTOTUNE_LLM"


def _parse_server(place: str, query: str, writing: bool) -> ModelSpec:
    try:
        url = urlsplit(place)
        host, port = url.hostname, url.port
    except ValueError as error:
        raise SettingsError(
            f"a server's address must be a URL such as http://localhost:8000/v1: {error}"
        ) from None
    if not host or url.fragment or port == 0:
        raise SettingsError("a server's address must name its host: http://localhost:8000/v1")
    arguments = dict(parse_qsl(query, keep_blank_values=True))
    kind = arguments.get("kind", SERVER_KINDS[0])
    if kind not in SERVER_KINDS:
        raise SettingsError(f"kind must be one of {', '.join(SERVER_KINDS)}")
    parsers = _SERVER_OPTIONS | (
        _CHAT_OPTIONS if kind == "chat" else _GENERATION_OPTIONS if writing and kind == "completions" else {}
    )
    options = _parse_options(query, parsers, f"kind={kind}")
    if "model" not in options:
        raise SettingsError(f"{place} needs ?model=NAME; the server lists its models at /v1/models")
    options.pop("kind", None)
    path = url.path.rstrip("/") or "/v1"
    return ModelSpec(kind, f"{url.scheme}://{url.netloc}{path}", options)


def _parse_options(query: str, parsers: Mapping[str, _OptionParser], what: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in parsers:
            word = repr(name) if _WORD.fullmatch(name) else "that is not a word"
            raise SettingsError(f"an option {word} is not known for {what}: known are {', '.join(parsers)}")
        if name in results:
            raise SettingsError(f"the option {name!r} is given twice")
        try:
            results[name] = parsers[name](text)
        except ValueError as error:
            raise SettingsError(f"the option {name!r} {error}") from None
    return results


def _refuse_secrets(text: str) -> None:
    query = text.partition("?")[2]
    has_option = any(_SECRET_OPTION.search(name) for name, _ in parse_qsl(query, keep_blank_values=True))
    login = "@" in text.partition("?")[0].partition("//")[2].partition("/")[0]
    keys = [os.environ.get("FORECAST_AUTOTUNE_LLM_KEY", ""), os.environ.get("OPENAI_API_KEY", "")]
    has_key = any(len(key) >= 8 and key in text for key in keys)
    if has_option or login or has_key or _SECRET_VALUE.search(text):
        raise SettingsError(
            "the model's address holds what looks like a key or a password: give the key in "
            "FORECAST_AUTOTUNE_LLM_KEY (or OPENAI_API_KEY), where it is neither shown nor stored"
        )
