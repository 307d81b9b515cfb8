"""What one config for a range costs, computed from times at every size; the ranges themselves."""

from __future__ import annotations

import math

import pytest

from benchmarks.ranges.live_ranges import (
    best_single,
    compared,
    slowdown,
    summarise,
)

TIMES = [{"a": 1.0, "b": 1.1, "c": 3.0}, {"a": 2.0, "b": 1.0, "c": 1.0}, {"a": 1.0, "b": 1.0}]


def test_a_slowdown_is_the_geometric_mean_over_sizes() -> None:
    assert slowdown(TIMES, "a") == pytest.approx(2.0 ** (1 / 3) - 1.0)
    assert slowdown(TIMES, "b") == pytest.approx(math.exp(math.log(1.1) / 3) - 1.0)
    assert slowdown(TIMES, "c") is None  # it did not run at the last size


def test_the_best_single_config_runs_everywhere() -> None:
    config, least = best_single(TIMES)
    assert config == "b"
    result = compared(TIMES, {"robust": "b", "middle": "c"})
    assert result["robust"] == result["best_single"] == round(least, 5)
    assert result["middle"] is None
    assert result["worst"] == {"best_single": 0.1, "robust": 0.1}


def test_means_are_over_kernels_in_which_all_choices_ran() -> None:
    def row(kernel: str, single: float, robust: float | None) -> dict[str, object]:
        measurements, seconds = (
            dict.fromkeys(("truth", "robust", "middle"), 3),
            {"robust": 1.0, "middle": 1.0},
        )
        return {
            **{"kernel": kernel, "sizes": 16, "best_single": single, "robust": robust, "middle": 0.5},
            "interpolated": single,
            **{"measurements": measurements, "seconds": seconds},
        }

    result = summarise([row("one", 0.0, 0.0), row("two", 0.21, 0.21), row("three", 0.0, None)])
    assert result["left_out"] == ["three"]
    assert result["slowdown"]["robust"] == pytest.approx(0.1)
    assert result["within_5_percent"] == {"best_single": 1, "interpolated": 1, "robust": 1, "middle": 0}
    assert result["where_best_single_within_5_percent"]["kernels"] == 1
