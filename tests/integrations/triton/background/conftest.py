"""Arguments of the null device lie in the host's memory."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The null device computes in the host's memory, also on a machine with another device."""
    from forecast_integrations.triton.problem import copied_tensors

    monkeypatch.setattr(copied_tensors, "has_accelerator", lambda: False)
