"""Settings: variables, their rules, and messages that name variable, value and rule."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.errors import SettingsError
from forecast_autotune.settings import Mode, Settings

GOOD: dict[str, tuple[str, Any]] = {
    "enabled": ("1", True),
    "cache_dir": ("/some/where", Path("/some/where")),
    "mode": ("frozen", Mode.FROZEN),
    "on_miss": ("forecast", "forecast"),
    "l2": ("warm", "warm"),
    "tolerance": ("0.05", 0.05),
    "risk": ("0.2", 0.2),
    "max_measurements": ("7", 7),
    "max_seconds": ("1.5", 1.5),
    "max_gpu_seconds": ("0.25", 0.25),
    "audit": ("0.01", 0.01),
    "bucket": ("pow2", "pow2"),
    "workers": ("3", 3),
    "compiler": ("threads", "threads"),
    "stall_ms": ("2.5", 2.5),
    "timeout_s": ("9", 9.0),
    "lock_timeout_s": ("0", 0.0),
    "stores": ("/some/bundle", "/some/bundle"),
    "remote": ("redis://cache:6379/0", "redis://cache:6379/0"),
    "remote_wait_s": ("1.5", 1.5),
    "ranks": ("alone", "alone"),
    "ranks_wait_s": ("5", 5.0),
    "inductor_space": ("exhaustive", "exhaustive"),
    "inductor_kernels": ("first", "first"),
    "model": ("/some/model.npz", Path("/some/model.npz")),
    "assets": ("/some/assets", Path("/some/assets")),
    "llm": ("http://localhost:8000/v1?model=m", "http://localhost:8000/v1?model=m"),
    "llm_trust": ("always", "always"),
    "llm_timeout_s": ("2.5", 2.5),
    "llm_key": ("not-a-real-key", True),
    "llm_max_tokens": ("100000", 100000),
    "llm_max_money": ("2.5", 2.5),
    "llm_max_seconds": ("60", 60.0),
    "advice": ("off", "off"),
    "variants": ("store", "store"),
    "prefer": ("bits", "bits"),
    "recheck_s": ("2.5", 2.5),
    "capture": ("moments", "moments"),
    "on_compile": ("error", "error"),
    "summary": ("yes", True),
    "telemetry": ("otel", "otel"),
    "seed": ("5", 5),
}
BAD = [
    ("FORECAST_AUTOTUNE", "maybe", "0 or 1"),
    (
        "FORECAST_AUTOTUNE_MODE",
        "fast",
        "one of tune, skip, frozen, exhaustive, deterministic, background, listen",
    ),
    ("FORECAST_AUTOTUNE_ON_MISS", "guess", "one of error, forecast"),
    ("FORECAST_AUTOTUNE_ON_COMPILE", "never", "one of warn, error, ignore"),
    ("FORECAST_AUTOTUNE_L2", "hot", "one of cold, warm, both"),
    ("FORECAST_AUTOTUNE_PREFER", "both", "one of speed, bits"),
    ("FORECAST_AUTOTUNE_TOLERANCE", "2%", r"a number from 0 to 10"),
    ("FORECAST_AUTOTUNE_TOLERANCE", "-0.1", r"a number from 0 to 10"),
    ("FORECAST_AUTOTUNE_RISK", "nan", r"a number from 0 to 1"),
    ("FORECAST_AUTOTUNE_AUDIT", "inf", r"a number from 0 to 1"),
    ("FORECAST_AUTOTUNE_MAX_MEASUREMENTS", "0", r"an integer from 1 to 1000000"),
    ("FORECAST_AUTOTUNE_MAX_MEASUREMENTS", "2.5", r"an integer from 1 to 1000000"),
    ("FORECAST_AUTOTUNE_MAX_SECONDS", "0", r"a number from 0.001 to 1e\+09"),
    ("FORECAST_AUTOTUNE_BUCKET", "log", "one of exact, pow2"),
    ("FORECAST_AUTOTUNE_WORKERS", "-1", r"an integer from 0 to 1024"),
    ("FORECAST_AUTOTUNE_WORKERS", "1000000000", r"an integer from 0 to 1024"),
    ("FORECAST_AUTOTUNE_STALL_MS", "1001", r"a number from 0 to 1000"),
    ("FORECAST_AUTOTUNE_RANKS", "all", "one of share, alone"),
    ("FORECAST_AUTOTUNE_INDUCTOR_SPACE", "all", "one of default, exhaustive"),
    ("FORECAST_AUTOTUNE_INDUCTOR_KERNELS", "never", "one of later, first"),
    ("FORECAST_AUTOTUNE_VARIANTS", "all", "one of off, store"),
    ("FORECAST_AUTOTUNE_LLM_TRUST", "maybe", "one of auto, always, never"),
    ("FORECAST_AUTOTUNE_TELEMETRY", "jaeger", "one of off, otel"),
    ("FORECAST_AUTOTUNE_SEED", "x", r"an integer from 0 to 4294967295"),
    ("FORECAST_AUTOTUNE_LLM_MAX_TOKENS", "1" + "0" * 18, r"an integer from 1 to 1000000000000000"),
]


def variable(name: str) -> str:
    (result,) = [f.metadata["variable"] for f in fields(Settings) if f.name == name]
    return str(result)


def test_every_setting_has_a_case_here() -> None:
    assert set(GOOD) == {f.name for f in fields(Settings)}


@pytest.mark.parametrize("name", GOOD)
def test_a_variable_and_with_set_their_setting_and_nothing_else(name: str) -> None:
    text, value = GOOD[name]
    settings = Settings.from_environment({variable(name): text})
    assert getattr(settings, name) == value
    assert type(getattr(settings, name)) is type(value)
    changed = {f.name for f in fields(Settings) if getattr(settings, f.name) != getattr(Settings(), f.name)}
    assert changed == {name}
    # `with_` takes what the variable takes.
    assert getattr(Settings().with_(**{name: value}), name) == value
    if name not in ("enabled", "summary"):
        assert getattr(Settings().with_(**{name: text}), name) == value
    assert Settings().with_(**{name: None}) == Settings()


@pytest.mark.parametrize(("name", "text", "rule"), BAD)
def test_a_bad_value_is_answered_with_variable_value_and_rule(name: str, text: str, rule: str) -> None:
    with pytest.raises(SettingsError, match=f"^{name}='{text}': must be {rule} \\(.+\\)$"):
        Settings.from_environment({name: text})


@pytest.mark.parametrize(
    "text", ["redis://u:secret@host/0", "redis://host/0?password=secret", "secret", "://secret"]
)
def test_an_address_with_secrets_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(SettingsError, match=r"^FORECAST_AUTOTUNE_REMOTE=\(not shown\): must ") as refused:
        Settings.from_environment({"FORECAST_AUTOTUNE_REMOTE": text})
    assert "secret" not in str(refused.value)
    with pytest.raises(SettingsError) as refused:
        Settings().with_(remote=text)
    assert "secret" not in str(refused.value)


def test_a_home_directory_is_found_without_a_shell() -> None:
    result = Settings.from_environment({"FORECAST_AUTOTUNE_CACHE_DIR": "~/kernels"}).cache_dir
    assert result == Path.home() / "kernels"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tolerance": -1.0}, r"^tolerance=-1.0: must be a number from 0 to 10 \(accepted regret"),
        ({"tolerance": True}, "^tolerance=True: must be a number"),
        ({"risk": "high"}, "^risk='high': must be a number"),
        ({"mode": "fast"}, "^mode='fast': must be one of tune"),
        ({"max_measurements": 2.5}, r"^max_measurements=2.5: must be an integer from 1 to 1000000"),
        ({"max_measurements": True}, "^max_measurements=True: must be an integer"),
    ],
)
def test_with_obeys_the_rules(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Settings().with_(**change)


def test_describe_lists_every_variable_once() -> None:
    rows = Settings(seed=4).describe()
    assert [row[0] for row in rows] == [variable(f.name) for f in fields(Settings)]
    assert ("FORECAST_AUTOTUNE_SEED", "4") in [row[:2] for row in rows]
    assert all(meaning for *_, meaning in rows)
