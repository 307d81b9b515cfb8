"""A GPU that is not there: kernels are compiled for real, launches only move a made-up clock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable of the developer decides a test, and no cache outlives one."""
    for name in os.environ:
        if name.startswith("FORECAST_AUTOTUNE") or name.endswith("_AUTOTUNING"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "measurements"))
    monkeypatch.setenv("FORECAST_AUTOTUNE_WORKERS", "2")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "binaries"))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


@pytest.fixture
def device(clean_environment: None) -> Iterator[Any]:
    """The active null device; the tests' kernels are fastest with 4 warps and 3 stages."""
    from forecast_integrations.triton.null_device import null_device
    from tests.integrations.null import by_launch_options

    with null_device(by_launch_options) as made:
        yield made
