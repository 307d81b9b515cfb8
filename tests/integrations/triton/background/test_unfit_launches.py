"""Launches whose arguments are none that a pending key can be timed with, and listeners that raise meanwhile."""

from __future__ import annotations

import time

import pytest
import torch

from forecast_autotune import settle
from forecast_integrations.triton.publication import LISTENERS
from tests.integrations.triton.background.increments import (
    IncrementingDevice,
    launch,
    launch_until_settled,
    tuned,
)
from tests.waiting import under_way


def test_a_key_that_is_launched_at_other_sizes_alone_holds_up_no_other(
    background: IncrementingDevice,
) -> None:
    warmed_up, other = tuned(), tuned()
    warmed_up.keys = []  # all sizes are one key, which was met at a size that never comes back
    launch(warmed_up, torch.zeros(4096))
    launch(warmed_up, torch.zeros(8192))
    until = time.monotonic() + 120
    while not other.cache:
        launch(warmed_up, torch.zeros(8192))
        launch(other, torch.zeros(4096))
        assert time.monotonic() < until, f"the other key is never decided; {under_way()}"
        time.sleep(0.001)
    assert not warmed_up.cache


def test_candidates_are_compared_at_one_size(background: IncrementingDevice) -> None:
    tuner = tuned()
    tuner.keys = []
    small, large = torch.zeros(4096), torch.zeros(65536)
    launch(tuner, small)
    (key,) = tuner._engine.pending.values()
    assert key.why_untimed((small, 4096), {}) is None
    assert "other sizes" in str(key.why_untimed((large, 65536), {}))


def test_settle_leaves_queued_keys_whose_arguments_are_gone_and_decides_the_others(
    background: IncrementingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_STALL_MS", "0.001")  # launches are queued, and lend no time
    tuner = tuned()
    for size in range(1024, 1024 + 6 * 16, 16):
        for _ in range(2):
            launch(tuner, torch.zeros(size))
    held = torch.zeros(4096)
    for _ in range(2):
        launch(tuner, held)
    with pytest.warns(UserWarning, match="keys are still pending"):
        left = settle()
    gone = {one.key[0] for one in left if "are gone" in one.reason}
    assert gone >= set(range(1024, 1120, 16))
    assert [key[0] for key in tuner.cache] == [4096]


def test_a_listener_that_raises_loses_no_choice(
    background: IncrementingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*told: object) -> None:
        raise ValueError("listener")

    monkeypatch.setattr("forecast_integrations.triton.publication.LISTENERS", [*LISTENERS, fail])
    tuner, x = tuned(), torch.zeros(4096)
    with pytest.raises(ValueError, match="listener"):
        launch(tuner, x)
    assert not tuner.cache, "the key is pending, whatever its listener says"
    with pytest.warns(UserWarning, match="a listener failed"):
        launch_until_settled(tuner, x)
    (config,) = tuner.cache.values()
    assert (config.num_warps, config.num_stages) == (4, 3)
