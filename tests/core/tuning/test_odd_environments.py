"""Environments of other people: unknown homes, narrow terminals, missing packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from forecast_autotune.commands import main
from forecast_autotune.errors import SettingsError
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store

NOBODY = "~nobody-of-this-name/cache"
Capture = pytest.CaptureFixture[str]


def test_the_home_of_an_unknown_user_is_a_settings_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"CACHE_DIR='~nobody.*spell it out"):
        Settings.from_environment({"FORECAST_AUTOTUNE_CACHE_DIR": NOBODY})
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", NOBODY)
    with pytest.raises(SettingsError, match="spell it out"):
        Store.default()


def test_doctor_examines_the_rest(root: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", NOBODY)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "spell it out" in shown
    assert "surrogate" in shown


def test_a_narrow_terminal_still_names_problems(
    root: Path, file: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["replay", str(file)]) == 0
    shown = capsys.readouterr().out
    assert all(len(line.rstrip()) <= 40 for line in shown.splitlines())
    for word in ("problem", "measured", "regret", "4096", "of 15"):
        assert word in shown
