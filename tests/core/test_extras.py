"""Extras: what messages and documentation tell a user to install is there to be installed."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("forecast_autotune", "integrations", "harness", "train", "benchmarks")
NAMED = re.compile(r"(?:forecast-autotune|install -e ['\"]?\.)\[([a-z,]+)\]")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]


def texts() -> Iterator[Path]:
    yield ROOT / "README.md"
    for folder in FOLDERS:
        yield from (ROOT / folder).rglob("*.py")


def packages(extra: str) -> set[str]:
    """The packages of an extra, and of those that it refers to."""
    referred = {name for requirement in EXTRAS[extra] for name in NAMED.findall(requirement)}
    own = {re.split(r"[<>=\[]", requirement)[0] for requirement in EXTRAS[extra]}
    return own.union(*map(packages, referred))


def test_every_extra_that_is_named_exists() -> None:
    named = {
        (extra, path.name)
        for path in texts()
        for result in NAMED.findall(path.read_text(encoding="utf-8"))
        for extra in result.split(",")
    }
    assert {extra for extra, _ in named} >= {
        "llm",
        "transformers",
        "vllm",
        "train",
        "eval",
    }
    assert [one for one in named if one[0] not in EXTRAS] == []


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
def test_what_doctor_misses_is_in_the_extra_it_names(kind: str) -> None:
    from forecast_integrations.models.factory import _PACKAGES, _REMEDIES

    (extra,) = NAMED.findall(_REMEDIES[kind])
    assert set(_PACKAGES[kind]) - {"torch"} <= packages(extra), "torch is the user's own"


def test_every_way_to_a_language_model_can_write_prompts() -> None:
    for extra in ("llm", "transformers", "vllm", "train", "test"):
        assert "jinja2" in packages(extra)
