"""`l2=`: what a timed launch finds in the L2, and where that makes another choice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.driver import driver

from forecast_autotune import SettingsError, autotune
from forecast_integrations.triton.null_device import NullDevice, null_device
from tests.integrations.null import configs, double, fresh, launch, tables


class CachingDevice(NullDevice):
    """Launches of 8 warps take 0.1 ms, and 0.02 if their data are in the cache; all others 0.06 or 0.05."""

    def __init__(self) -> None:
        super().__init__(self.time)
        self.is_warm = False

    def time(self, metadata: Any) -> float:
        warm, self.is_warm = self.is_warm, True
        few = 1e-4 * metadata.num_stages
        return few + ((0.02 if warm else 0.1) if metadata.num_warps == 8 else 0.05 if warm else 0.06)

    def clear_cache(self, cache: NullDevice) -> None:
        super().clear_cache(cache)
        self.is_warm = False


@pytest.fixture
def device(shared_cache: None) -> Iterator[CachingDevice]:
    with null_device():
        driver.set_active(made := CachingDevice())  # type: ignore[arg-type]
        yield made


def tuned(store: Path, **given: Any) -> Any:
    return autotune(configs((4, 8), (1, 2)), key=["n"], store=store, mode="exhaustive", **given)(
        fresh(double)
    )


def test_cold_and_warm_calls_are_problems_of_their_own(device: CachingDevice, tmp_path: Path) -> None:
    chosen = {}
    for l2 in ("cold", "warm", "cold"):
        tuner = tuned(tmp_path, l2=l2)
        launch(tuner)
        chosen[l2] = tuner.best_config.num_warps
    assert chosen == {"cold": 4, "warm": 8}
    cold, warm = sorted(tables(tmp_path), key=lambda t: "warm" in t.measurements[0].protocol)
    assert cold.problem.id != warm.problem.id
    assert {m.cache_state for m in warm.measurements} == {"l2warm"}
    assert {m.cache_state for m in cold.measurements} == {"l2read"}


def test_both_takes_the_cold_choice_and_says_what_is_faster_warm(
    device: CachingDevice, tmp_path: Path
) -> None:
    tuner = tuned(tmp_path, l2="both")
    launch(tuner)
    assert tuner.best_config.num_warps == 4
    assert "with its data in the L2, BLOCK=128 warps=8 stages=1" in tuner.decision.reason
    assert "l2='warm' takes it" in tuner.decision.reason
    assert {m.cache_state for t in tables(tmp_path) for m in t.measurements} == {"l2read"}
    same = tuned(tmp_path / "same", l2="both", tolerance=9.0)
    launch(same)
    assert "as fast as any with its data in the L2" in same.decision.reason


def test_what_does_not_fit_is_not_timed_warm(device: CachingDevice, tmp_path: Path) -> None:
    tuner = tuned(tmp_path, l2="both")
    n = 16 << 20
    x = torch.empty(1).expand(n)
    tuner[(1,)](x, x, n)
    assert "L2" not in tuner.decision.reason


def test_other_states_are_refused_where_they_are_written(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="one of cold, warm, both"):
        tuned(tmp_path, l2="hot")
