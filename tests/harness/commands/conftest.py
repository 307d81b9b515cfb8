"""What tests of commands on a kernel's file share: a store of their own, and the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A store and a folder of this test's own."""
    for name in [n for n in os.environ if n.startswith("FORECAST_AUTOTUNE")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def kernel(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """KERNEL.py:FN of a file of the module's KERNEL and INPUTS; a new module name for every test."""
    path = tmp_path / f"kernel_{tmp_path.name.replace('-', '_')}.py"
    path.write_text(request.module.KERNEL + request.module.INPUTS)
    return f"{path}:double"
