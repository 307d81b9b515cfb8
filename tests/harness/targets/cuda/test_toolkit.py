"""Where nvcc is looked for."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from forecast_autotune.errors import SettingsError
from forecast_harness.targets.cuda import toolkit


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine without nvcc."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolkit, "_USUAL_PLACE", str(tmp_path / "none"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "packages"))
    for result in (toolkit.find_nvcc, toolkit.nvcc_release):
        result.cache_clear()
    yield
    for result in (toolkit.find_nvcc, toolkit.nvcc_release):
        result.cache_clear()


def program(path: Path, said: str = "Cuda compilation tools, release 13.0, V13.0.88") -> Path:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho '{said}'\n")
    path.chmod(0o755)
    return path


def test_without_one_it_is_said_what_to_do() -> None:
    with pytest.raises(SettingsError, match=r"forecast-autotune\[cuda\]"):
        toolkit.find_nvcc()


@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH"])
def test_a_variable_names_the_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    result = program(tmp_path / "toolkit" / "bin" / "nvcc")
    monkeypatch.setenv(name, str(tmp_path / "toolkit"))
    assert toolkit.find_nvcc() == str(result)
    assert toolkit.nvcc_release() == "13.0"
    assert str(tmp_path / "toolkit") in toolkit.header_roots()


@pytest.mark.parametrize("place", ["nvidia/cu13/bin/nvcc", "nvidia/cuda_nvcc/bin/nvcc"])
def test_a_wheel_brings_one(tmp_path: Path, place: str) -> None:
    result = program(tmp_path / "packages" / place)
    assert toolkit.find_nvcc() == str(result)


def test_a_variable_that_leads_nowhere_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = program(tmp_path / "path" / "nvcc", "nothing known")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    monkeypatch.setattr(shutil, "which", lambda name: str(result))
    assert toolkit.find_nvcc() == str(result)
    assert toolkit.nvcc_release() == ""
