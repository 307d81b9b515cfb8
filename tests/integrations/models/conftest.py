"""Fixtures for tests of language models."""

from __future__ import annotations

import pytest


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries follow at once."""
    monkeypatch.setattr(pytest.importorskip("openai._base_client"), "INITIAL_RETRY_DELAY", 0.02)
