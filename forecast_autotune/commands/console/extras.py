"""What to install when a package is missing: one answer for all commands."""

from __future__ import annotations

import importlib.util

from forecast_autotune.commands.output import CommandError

_TORCH = "install torch for your GPU: https://pytorch.org/get-started"
_REQUIRED = ("filelock", "numpy", "platformdirs", "rich", "threadpoolctl")
_REINSTALL = "pip install --force-reinstall forecast-autotune"
_EXTRAS = {
    "triton": "triton",
    "matplotlib": "plot",
    "pyarrow": "parquet",
    "lightgbm": "eval",
    "sklearn": "eval",
    "jinja2": "llm",
    "openai": "llm",
    "ray": "ray",
    "fsspec": "remote",
    "redis": "remote",
    "opentelemetry": "telemetry",
    "transformers": "transformers",
    "safetensors": "transformers",
    "vllm": "vllm",
    "peft": "train",
    "trl": "train",
    "datasets": "train",
    "accelerate": "train",
}


def remedy_of(package: str) -> str | None:
    """How to get an optional package, named as it is imported; None for one that no extra brings."""
    if package == "torch":
        return _TORCH
    extra = _EXTRAS.get(package)
    return None if extra is None else f"pip install 'forecast-autotune[{extra}]'"


def is_installed(package: str) -> bool:
    """Whether a package can be found; it is not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # something refuses it, or stands in its place
        return False


def require_packages(command: str, *names: str) -> None:
    """Raises `CommandError` naming those that are not installed, and how to get them."""
    if missing := [name for name in names if not is_installed(name)]:
        remedies = "; ".join(dict.fromkeys(remedy_of(name) or f"pip install {name}" for name in missing))
        raise CommandError(f"{command} needs {' and '.join(missing)}, not installed here: {remedies}")


def missing_package_text(error: ImportError) -> str | None:
    """An import that failed for want of another package as one line; None where it is something else."""
    package = (error.name or "").partition(".")[0]
    remedy = _REINSTALL if package in _REQUIRED else remedy_of(package)
    return None if remedy is None else f"this needs {package}, not installed here: {remedy}"
