"""A device is kept busy for a moment before it is timed, and only one that is in use."""

from __future__ import annotations

import time

import pytest

from forecast_integrations.triton.timer import timers


def test_a_device_is_busy_for_as_long_as_asked_and_waited_for() -> None:
    log: list[str] = []
    begin = time.perf_counter()
    steps = timers.keep_busy(lambda: log.append("step"), lambda: log.append("wait"), 0.005)
    assert time.perf_counter() - begin >= 0.005
    assert log[-1] == "wait"
    assert log.count("step") == 50 * log.count("wait") == steps


def test_no_device_is_opened_for_it() -> None:
    torch = pytest.importorskip("torch")
    before = torch.cuda.is_initialized()
    timers.warm_up_cuda()
    assert torch.cuda.is_initialized() == before
