"""The record of what a model is worth: its parts, its file, and where it is found."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.llm.bins import BINS, Bins
from forecast_autotune.llm.calibration import (
    UNKNOWN_DEVICE_WIDENING,
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
from forecast_autotune.llm.question_kinds import (
    CONFIG,
    NO_IR,
    SOURCE,
    UNKNOWN_DEVICE,
    QuestionWeight,
    known_class,
    question_kind,
)
from forecast_autotune.llm.similarity import FittedProblems
from forecast_autotune.records import Device

FULL = LLMCalibration(
    "transformers:some/model+adapter",
    FORECAST_VERSION,
    temperature=1.7,
    ratio=MonotoneCurve((-0.5, 0.1, 2.0), (-0.3, 0.1, 1.5)),
    fails=MonotoneCurve((0.0, 1.0), (0.01, 0.9)),
    intervals={"pooled": (1.0, 1.1, 1.2, 1.3), "nvidia-h200": (0.8, 0.9, 1.4, 1.0)},
    weights={"pooled": BlendWeight(0.4, 0.3), "product": BlendWeight(0.6, 0.3)},
    decay=((1.0, 1.0), (2.0, 0.5)),
    questions={
        "source": QuestionWeight(0.2, 0.1, 9, 4, 0.01, -0.02, 0.05),
        "config": QuestionWeight(0.4, 0.3),
    },
    known=(1.0, 0.5, 0.25),
    fail_weight=0.2,
    saved=0.15,
    scope=CalibrationScope(
        ("nvidia-h200",), ("triton",), 7000, 0.05, FittedProblems(((0.0, 1.0), (2.0, 3.0)), (1.0, 1.0), 2.5)
    ),
    pace=ModelLatency(2e-5, 4.0, 0.03),
    about={"problems": 36},
)


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "calibration.json"
    write(path, FULL)
    assert read(path) == FULL
    assert json.loads(path.read_text())["schema"] == 1


def test_an_unlimited_reach_survives_the_file(tmp_path: Path) -> None:
    write(tmp_path / "c.json", LLMCalibration("m", FORECAST_VERSION))
    assert math.isinf(read(tmp_path / "c.json").scope.map.reach)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 99},
        {"temperature": 0},
        {"temperature": "hot"},
        {"ratio": [[0, 1], [1, 0]]},
        {"ratio": [[0, 0], [0, 1]]},
        {"intervals": {"pooled": [1, 2]}},
        {"intervals": {"pooled": [1, 2, 3, -4]}},
        {"weights": {"pooled": {"mean": 2, "sd": 0}}},
        {"weights": {"of no kind": {"mean": 0, "sd": 0}}},
        {"weights": [1]},
        {"questions": {"riddle": {"mean": 0.1, "sd": 0.1}}},
        {"questions": {"source": {"mean": 1.1, "sd": 0.1}}},
        {"questions": {"source": {"mean": 0.1, "saved": 2.0}}},
        {"known": [1.0, 0.5]},
        {"known": [1.0, 0.5, -1.0]},
        {"saved": 1.5},
        {"pace": {"per_token_s": 1, "strange": 2}},
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


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"schema": 1}'])
def test_what_is_no_calibration_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
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
    assert not plain.skilled
    assert plain.weight("product", 0.0) == BlendWeight()
    assert FULL.skilled
    assert not replace(FULL, weights={"pooled": BlendWeight()}, questions={}).skilled
    assert replace(FULL, weights={"pooled": BlendWeight()}).skilled


def test_weights_go_by_kind_and_fall_with_distance() -> None:
    assert FULL.weight("product", 0.5).mean == pytest.approx(0.6)
    assert FULL.weight("scan", 0.5).mean == 0.4
    assert FULL.weight("product", 1.5).mean == pytest.approx(0.3)
    assert FULL.weight("product", 9.9).mean == pytest.approx(0.3)
    assert FULL.weight("unread", math.inf).mean == 0.4


def test_weights_go_by_kind_of_question_and_fall_with_what_is_known() -> None:
    """A kind of kernel is followed as much more or less in every kind of question."""
    assert FULL.weight("scan", 0.5, SOURCE).mean == pytest.approx(0.2)
    assert FULL.weight("product", 0.5, SOURCE).mean == pytest.approx(0.3)
    assert FULL.weight("product", 0.5, NO_IR).mean == pytest.approx(0.6), "pooled where none was recorded"
    assert [FULL.weight("scan", 1.5, SOURCE, n).mean for n in (0, 1, 3, 4, 40)] == pytest.approx(
        [0.1, 0.05, 0.05, 0.025, 0.025]
    )
    nowhere_else = replace(FULL, weights={"pooled": BlendWeight()}, known=())
    assert nowhere_else.weight("scan", 0.5, SOURCE).mean == 0.2
    assert nowhere_else.weight("scan", 0.5, NO_IR).mean == 0.0


def test_savings_go_by_kind_of_question() -> None:
    assert (FULL.saving(SOURCE), FULL.saving(CONFIG), FULL.saving(NO_IR)) == (0.05, 0.15, 0.15)
    assert FULL.saving(SOURCE, 5) == pytest.approx(0.05 * 0.25), "the less, the less it is followed"
    assert (FULL.regret_saved(SOURCE), FULL.regret_saved(NO_IR)) == (-0.02, None)
    ignored = replace(FULL, questions={"source": QuestionWeight(0.0, 0.0, saved=0.3)})
    assert ignored.saving(SOURCE) == 0.0, "what is not followed saves nothing"


def test_a_file_of_before_there_were_kinds_of_questions_is_read(tmp_path: Path) -> None:
    data = FULL.to_json()
    for name in ("questions", "known"):
        del data[name]
    del data["pace"]["answer_s"]
    (tmp_path / "c.json").write_text(json.dumps(data))
    old = read(tmp_path / "c.json")
    assert old == replace(FULL, questions={}, known=(), pace=ModelLatency(2e-5, 4.0))
    for question in (CONFIG, SOURCE, UNKNOWN_DEVICE):
        assert old.weight("product", 1.5, question, 5) == old.weight("product", 1.5)
    assert "questions" not in old.to_json(), "so its mark stays what it was"


def test_kinds_of_questions() -> None:
    known = Device("NVIDIA H200", "cuda", "90")
    assert question_kind(known, True, 1) == CONFIG
    assert question_kind(known, True, 2) == SOURCE
    assert question_kind(known, False, 2) == NO_IR
    assert question_kind(replace(known, name="Abacus 3"), True, 1) == UNKNOWN_DEVICE
    assert [known_class(n) for n in (0, 1, 3, 4, 99)] == [0, 1, 1, 2, 2]


def test_temperature_one_changes_nothing_and_a_high_one_flattens() -> None:
    p = BINS.soft_targets([0.0, 0.7], 0.2)
    np.testing.assert_allclose(LLMCalibration("m").temperature_scaled(p), p, atol=1e-9)
    flat = replace(FULL, temperature=100.0).temperature_scaled(p)
    assert np.ptp(flat, axis=1).max() < 0.05
    np.testing.assert_allclose(flat.sum(axis=1), 1.0)


def test_rows_that_say_nothing_keep_saying_nothing() -> None:
    assert FULL.temperature_scaled(np.zeros((2, 16))).sum() == 0.0
    assert FULL.trust(np.zeros((2, 16)), np.ones(2)).sum() == 0.0


@pytest.mark.parametrize("mass", [0.01, math.nan])
def test_an_answer_without_mass_is_not_trusted(mass: float) -> None:
    assert FULL.trust(BINS.soft_targets([0.0], 0.2), np.array([mass])) == 0.0
    assert FULL.trust(BINS.soft_targets([0.0], 0.2), np.array([0.06])) > 0.0


def test_a_monotone_correction_goes_on_beyond_its_ends() -> None:
    """The fastest candidates lie there: made alike, they could not be told apart."""
    curve = MonotoneCurve((0.0, 1.0, 2.0), (0.0, 0.5, 2.5))
    np.testing.assert_allclose(curve(np.array([-1.0, 0.5, 1.0, 3.0])), [-0.5, 0.25, 0.5, 3.5])
    assert MonotoneCurve((1.0,), (0.3,))(np.array([-5.0, 5.0])).tolist() == [0.3, 0.3]
    assert MonotoneCurve()(np.array([0.7])).tolist() == [0.7]


def test_an_unknown_device_has_the_widest_intervals_and_more() -> None:
    assert FULL.interval_factors("nvidia-h200") == (0.8, 0.9, 1.4, 1.0)
    assert FULL.interval_factors("unknown") == pytest.approx(
        (
            UNKNOWN_DEVICE_WIDENING * 1.0,
            UNKNOWN_DEVICE_WIDENING * 1.1,
            UNKNOWN_DEVICE_WIDENING * 1.4,
            UNKNOWN_DEVICE_WIDENING * 1.3,
        )
    )
    assert LLMCalibration("m").interval_factors("any") == (1.0, 1.0, 1.0, 1.0)


def test_a_mark_names_what_it_says_and_not_where_it_comes_from() -> None:
    assert replace(FULL, about={}, pace=ModelLatency()).mark() == FULL.mark()
    assert replace(FULL, temperature=1.8).mark() != FULL.mark()


def test_distances_are_in_standard_deviations_to_the_nearest_place() -> None:
    places = FittedProblems(((0.0, 0.0), (10.0, 0.0)), (2.0, 0.0), 3.0)
    assert places.distance(np.array([8.0, 0.0])) == pytest.approx(math.sqrt(1.0 / 2))
    assert math.isinf(places.distance(None))
    assert math.isinf(places.distance(np.zeros(3)))
    assert math.isinf(FittedProblems().distance(np.zeros(2)))
    with pytest.raises(ValueError, match="2 coordinates"):
        FittedProblems(((0.0,),), (1.0, 1.0))
