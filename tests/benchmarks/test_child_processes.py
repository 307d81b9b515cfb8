"""What a benchmark's child processes inherit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.lib.environment import ROOT
from benchmarks.lib.processes.child_processes import child_environment

if TYPE_CHECKING:
    import pytest


def test_a_child_in_another_folder_imports_what_its_parent_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([".", "integrations", "/elsewhere"]))
    paths = child_environment(tmp_path)["PYTHONPATH"].split(os.pathsep)
    assert paths == [str(ROOT), str(tmp_path), str(tmp_path / "integrations"), "/elsewhere"]
    monkeypatch.delenv("PYTHONPATH")
    assert child_environment(tmp_path)["PYTHONPATH"] == str(ROOT)


def test_a_child_has_caches_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_MODE", "skip")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("HOME", "/somewhere")
    result = child_environment(tmp_path, WANTED="1")
    assert "FORECAST_AUTOTUNE_MODE" not in result
    assert "TRITON_INTERPRET" not in result
    assert (result["HOME"], result["WANTED"]) == ("/somewhere", "1")
    for name in ("TRITON_CACHE_DIR", "FORECAST_AUTOTUNE_CACHE_DIR"):
        assert Path(result[name]).is_relative_to(tmp_path)
