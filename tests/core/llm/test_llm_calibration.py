"""The record of what a model is worth: its parts, its file, and where it is found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.llm.bins import Bins
from forecast_autotune.llm.calibration import (
    BlendWeight,
    CalibrationScope,
    LLMCalibration,
    ModelLatency,
    MonotoneCurve,
    calibration_path,
    find_calibration,
    read,
    write,
)
from forecast_autotune.llm.prompt import FORECAST_VERSION

FULL = LLMCalibration(
    "transformers:some/model+adapter",
    FORECAST_VERSION,
    temperature=1.7,
    ratio=MonotoneCurve((-0.5, 0.1, 2.0), (-0.3, 0.1, 1.5)),
    weight=BlendWeight(0.4, 0.3),
    saved=0.15,
    scope=CalibrationScope(("nvidia-h200",), ("triton",), 7000, 0.05),
    pace=ModelLatency(0.03),
    about={"problems": 36},
)


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "calibration.json"
    write(path, FULL)
    assert read(path) == FULL
    assert json.loads(path.read_text())["schema"] == 2


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 99},
        {"temperature": 0},
        {"temperature": "hot"},
        {"ratio": [[0, 1], [1, 0]]},
        {"ratio": [[0, 0], [0, 1]]},
        {"weight": {"mean": 2, "sd": 0}},
        {"weight": [1]},
        {"weight": None},
        {"saved": 1.5},
        {"pace": {"answer_s": "soon"}},
        {"bins": [3, 2, 1]},
        {"scope": None},
    ],
)
def test_a_damaged_file_is_refused_with_its_name_and_a_remedy(
    tmp_path: Path, change: dict[str, object]
) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**FULL.to_json(), **change}))
    with pytest.raises(RecordError, match=r"c\.json"):
        read(path)


def test_the_first_file_that_is_there_counts(tmp_path: Path) -> None:
    beside, cached = tmp_path / "adapter" / "c.json", calibration_path("m", tmp_path)
    assert find_calibration("m", FORECAST_VERSION, [beside, cached]) == LLMCalibration("m", FORECAST_VERSION)
    write(cached, replace(FULL, temperature=2.0))
    assert find_calibration("m", FORECAST_VERSION, [beside, cached]).temperature == 2.0
    write(beside, FULL)
    assert find_calibration("m", FORECAST_VERSION, [beside, cached]) == FULL


def test_one_of_another_prompt_or_other_bins_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    for other in (replace(FULL, prompt="forecast-0"), replace(FULL, bins=Bins((0.5, 1.0, 2.0)))):
        write(path, other)
        with pytest.raises(RecordError, match="calibrate-llm"):
            find_calibration("m", FORECAST_VERSION, [path])


def test_without_a_calibration_a_model_has_no_skill_and_no_weight() -> None:
    plain = LLMCalibration("m", FORECAST_VERSION)
    assert (plain.skilled, plain.fitted, plain.weight) == (False, False, BlendWeight())
    assert FULL.skilled
    unskilled = replace(FULL, weight=BlendWeight())
    assert (unskilled.skilled, unskilled.fitted) == (False, True)


def test_a_file_of_schema_1_is_read_with_its_pooled_weight(tmp_path: Path) -> None:
    """It had weights by kind of kernel and of question, factors by distance, and curves of failures."""
    data = {name: value for name, value in FULL.to_json().items() if name != "weight"}
    data |= {
        "schema": 1,
        "weights": {"pooled": {"mean": 0.4, "sd": 0.3}, "product": {"mean": 0.6, "sd": 0.3}},
        "fails": [[0.0, 0.01], [1.0, 0.9]],
        "intervals": {"pooled": [1.0, 1.1, 1.2, 1.3]},
        "decay": [[1.0, 1.0], [2.0, 0.5]],
        "questions": {"source": {"mean": 0.2, "sd": 0.1}},
        "known": [1.0, 0.5, 0.25],
        "remains": 0.9,
        "fail_weight": 0.2,
        "scope": {**data["scope"], "map": {"places": [[0.0]], "scale": [1.0], "reach": None}},
    }
    (tmp_path / "c.json").write_text(json.dumps(data))
    assert read(tmp_path / "c.json") == FULL
