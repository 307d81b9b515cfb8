"""Fixtures for tests of language models."""

from __future__ import annotations

import pytest

from forecast_integrations.models.http import transport


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries follow at once."""
    monkeypatch.setattr(transport, "FIRST_WAIT_S", 0.02)
