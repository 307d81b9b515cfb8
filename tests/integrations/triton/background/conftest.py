"""A background tuner that begins anew, on a null device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The null device computes in the host's memory, also on a machine with another device."""
    from forecast_integrations.triton.background import arguments

    monkeypatch.setattr(arguments, "has_accelerator", lambda: False)


@pytest.fixture
def background(clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The active device, in background mode; timing takes at most 500 of a second's 1000 milliseconds."""
    # Here, since collecting the fast suite imports this file and must not load torch.
    from triton.runtime.driver import driver

    from forecast_integrations.triton.background.tuner import BACKGROUND, StallBudget
    from forecast_integrations.triton.null_device import null_device
    from tests.integrations.null import by_launch_options
    from tests.integrations.triton.background.increments import IncrementingDevice

    monkeypatch.setenv("FORECAST_AUTOTUNE_MODE", "background")
    monkeypatch.setenv("FORECAST_AUTOTUNE_STALL_MS", "500")
    with null_device():
        made = IncrementingDevice(by_launch_options)
        driver.set_active(made)  # type: ignore[arg-type]
        yield made
        BACKGROUND.stop(60.0)
    BACKGROUND.budget = StallBudget()
    BACKGROUND._keys.clear()  # a pending key of a tuner that something keeps alive is no affair of the next test
    BACKGROUND.reset()
