"""Timing in turns, on the null device."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from benchmarks.lib import kernel_timing
from forecast_integrations.triton.null_device import NullDevice, null_device

HOST_S = 0.0004


@pytest.fixture
def device() -> Any:
    with null_device() as result:
        yield result


def flushes_before(
    device: NullDevice, monkeypatch: pytest.MonkeyPatch, calls: list[Callable[[], object]], rounds: int
) -> list[list[int]]:
    """Per call: how often L2 was flushed since the launch before it, in every round of a timing."""
    seen: list[list[int]] = [[] for _ in calls]
    since = [0]

    def clear_cache(cache: Any) -> None:
        since[0] += 1
        device.now_ms += 0.05

    def noted(i: int) -> None:
        seen[i].append(since[0])
        since[0] = 0
        calls[i]()

    monkeypatch.setattr(device, "clear_cache", clear_cache)
    kernel_timing.time_in_turns([partial(noted, i) for i in range(len(calls))], rounds)
    return [result[-rounds + 1 :] for result in seen]  # the first launches have more before them


def test_the_device_has_work_until_the_slowest_call_is_queued(
    device: NullDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = flushes_before(device, monkeypatch, [lambda: None, lambda: time.sleep(HOST_S)], 6)
    (count,) = set(result[0][1:] + result[1][1:])
    assert count * 0.05 >= 1e3 * HOST_S
    assert count <= kernel_timing.MOST_FLUSHES


def test_a_host_that_cannot_be_outrun_is_not_waited_for(
    device: NullDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = 2 * kernel_timing.MOST_FLUSHES * 0.05 / 1e3
    (result,) = flushes_before(device, monkeypatch, [lambda: time.sleep(slow)], 3)
    assert set(result) == {kernel_timing.MOST_FLUSHES}


def test_times_are_those_of_the_device(device: NullDevice) -> None:
    def kernel(ms: float) -> None:
        device.now_ms += ms

    fast, slow = kernel_timing.time_in_turns([partial(kernel, 0.25), partial(kernel, 0.5)], 4)
    assert fast == pytest.approx([0.25] * 4)
    assert slow == pytest.approx([0.5] * 4)
