"""Whether the model that a specification names is there: an error at once, not in the middle of work."""

from __future__ import annotations

import os
import socket
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from forecast_autotune.commands.console.extras import is_installed
from forecast_autotune.errors import SettingsError
from forecast_autotune.llm.spec import ModelSpec, parsed

_PACKAGES = {
    "transformers": ("jinja2", "torch", "transformers", "safetensors"),
    "vllm": ("jinja2", "torch", "vllm"),
    "recorded": (),
}
"""Packages by kind of backend that runs here."""
_SERVER_PACKAGES = ("jinja2", "httpx")
_REMEDIES = {
    "transformers": "pip install 'forecast-autotune[transformers]'",
    "vllm": "pip install 'forecast-autotune[vllm]', or a build for your device: https://docs.vllm.ai",
}
CONNECT_S = 3.0
"""Most seconds that a server is given to take a connection."""
_LOCAL_KINDS = ("transformers", "vllm")
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_HUB_CACHES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")


def check(text: str, *, contact: bool = True, connect_s: float = CONNECT_S) -> None:
    """Raises `SettingsError` where the model cannot be there: naming the rule, the value and the remedy.

    A folder must hold a model, a file of recorded answers must be one, and with `contact` a server must take a
    connection within `connect_s`. A name on the hub passes, as it is fetched at its first use, but not offline.
    """
    spec = parsed(text, writing=True)
    _check_packages(spec)
    if spec.kind == "recorded":
        from forecast_integrations.models.recorded import RecordedAnswers

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
    """How to get the packages that a model's kind needs."""
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
    elif any(os.environ.get(v, "") not in ("", "0") for v in _OFFLINE_VARIABLES) and not _in_hub_cache(name):
        raise SettingsError(
            f"{name} is no folder and not in the hub's cache, and {' or '.join(_OFFLINE_VARIABLES)} forbids to "
            f"fetch it: give a folder, or fetch it beforehand (hf download {name})"
        )


def _in_hub_cache(name: str) -> bool:
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    place = next((os.environ[v] for v in _HUB_CACHES if os.environ.get(v)), f"{home}/hub")
    return (Path(place).expanduser() / f"models--{name.replace('/', '--')}").is_dir()


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
