"""What benchmarks of other tools say of arms that took turns."""

from __future__ import annotations

import pytest

from benchmarks.lib.bridges.turns import ratios_to


def row(kernel: str, arm: str, seconds: float, ms: float) -> dict[str, object]:
    return {"kernel": kernel, "arm": arm, "tune_s": seconds, "ms": ms}


def test_ratios_are_of_medians_over_repeats_and_of_what_both_have() -> None:
    rows = [
        *(row("a", "ours", seconds, 1.0) for seconds in (1.0, 2.0, 30.0)),
        *(row("a", "theirs", seconds, 2.0) for seconds in (8.0, 7.0, 9.0)),
        row("b", "ours", 1.0, 1.0),
        row("b", "theirs", 9.0, 0.5),
        row("c", "theirs", 1.0, 1.0),
    ]
    result = ratios_to(rows, subject="kernel", ours="ours", others=("theirs", "nobody"))
    assert list(result) == ["theirs"]
    assert result["theirs"] == {
        "kernels": 2,
        "seconds_ratio": pytest.approx(6.0),  # of 4 and 9
        "latency_ratio": pytest.approx(1.0),  # of 0.5 and 2
        "worst_latency_ratio": pytest.approx(2.0),
        "latency_ratios": {"a": pytest.approx(0.5), "b": pytest.approx(2.0)},
    }
