"""Telemetry that a test switches on is off again when it ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forecast_autotune.telemetry import spans
from tests.core.telemetry.recorder import Recorder


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    yield
    spans.close()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """The only exporter."""
    result = Recorder()
    monkeypatch.setattr(spans._state, "exporter", result)
    return result
