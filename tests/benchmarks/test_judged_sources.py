"""Sources that were judged once, measured again in other orders."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.search import judged_sources as judged
from forecast_harness.records import NodeForecast

RATIOS = {"01.py": 0.5, "02.py": None, "03.py": -1.0, "04.py": -0.25}


def row(file: str, **places: int) -> dict[str, Any]:
    ratio = RATIOS[file]
    said = [ratio or 0.0, 0.01, 0.0 if ratio is None else 1.0]
    return {"file": file, "log2_ratio": ratio, "device_s": 0.5, "places": places, "said": said}


def test_a_curve_is_the_best_so_far_in_an_order() -> None:
    rows = [row(f, a=i, d=3 - i) for i, f in enumerate(RATIOS)]
    curves = judged._curves(rows)
    assert curves["a"] == {"gain": [0.0, 0.0, 1.0, 1.0], "seconds": [0.5, 1.0, 1.5, 2.0]}
    assert curves["d"]["gain"] == [0.25, 1.0, 1.0, 1.0]
    assert judged._at_share(curves, "d", 0.5) == judged._at_seconds(curves, "d", 0.5) == 1.0
    assert judged._considered({"k": curves}, "a")["mean"] == 3.0


def test_forecasts_that_are_right_leave_no_risk() -> None:
    scores = judged._scores([row(f) for f in RATIOS], "said")
    assert (scores["risk"], scores["aurc"], scores["precision"], scores["recall"]) == (0.0, 0.0, 1.0, 1.0)
    assert scores["ece"] == pytest.approx(0.0, abs=1e-6)
    assert judged._best_tenth({"k": [row(f) for f in RATIOS]}, "said") == 1.0
    assert judged._best_place({"k": [row(f) for f in RATIOS]}, "said") == 0.0
    assert judged._best_tenth({"k": [row(f) for f in RATIOS]}, "") == pytest.approx(0.25, abs=0.1)


def test_the_promising_are_measured_first_and_all_are_in_the_end() -> None:
    files = [f"{n:02d}.py" for n in range(12)]

    def believe(left: list[str], done: list[str]) -> dict[str, NodeForecast]:
        return {f: judged._belief(-0.1 * int(f[:2]), 0.2, 0.0) for f in left}

    order = judged._measured(files, believe, "seed")
    assert sorted(order) == files
    assert set(order[:3]) == {"11.py", "10.py", "09.py"}
