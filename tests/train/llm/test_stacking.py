"""What a model's answers earn beside the learned forecast: much, little, or nothing, by kind of question."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forecast_autotune.llm.calibration import BlendWeight, LLMCalibration, ModelLatency
from forecast_autotune.llm.question_kinds import CONFIG, SOURCE, QuestionWeight
from forecast_train.commands.calibrate_llm import _summary_text
from forecast_train.llm.calibration.saving_estimate import PairedReplay, with_saving
from forecast_train.llm.calibration.stacking import (
    CrossValidatedWeight,
    StackingEvidence,
    StackingWeights,
    fast_end,
    fit_stacking,
    group_weight,
    log_scores,
    pooled_weight,
)


def evidence(
    skill: float,
    *,
    noise: float = 1.0,
    families: int = 15,
    each: int = 3,
    question: str = CONFIG,
    known: int = 0,
    seed: int = 0,
    prefix: str = "f",
) -> list[StackingEvidence]:
    """Problems of 40 candidates whose learned forecast errs by 0.3 and whose model knows a share of that error."""
    generator = np.random.default_rng(seed)
    found = []
    for number in range(families * each):
        learned = np.sort(generator.uniform(0.0, 1.2, 40))
        error = 0.3 * generator.standard_normal(40)
        gap = skill * error + 0.3 * noise * generator.standard_normal(40)
        name = f"{prefix}{number % families}"
        one = fast_end(
            learned + error, learned, gap, np.ones(40, bool), family=name, kind="pointwise",
            question=question, known=known, distance=float(number),
        )  # fmt: skip
        assert one is not None
        found.append(one)
    return found


def fitted(*parts: list[StackingEvidence]) -> StackingWeights:
    return fit_stacking([e for part in parts for e in part])


def test_a_small_true_skill_is_a_small_weight_and_a_large_one_a_large() -> None:
    """The best weight of a model that knows a share s of the error, and errs by as much itself, is s / (s² + 1)."""
    small, large = fitted(evidence(0.12)), fitted(evidence(1.0, noise=0.2))
    assert 0.03 < small.weights["pooled"].mean < 0.25
    assert small.questions[CONFIG].log_score > 0.0
    assert large.weights["pooled"].mean > 0.8
    assert large.questions[CONFIG].log_score > 10 * small.questions[CONFIG].log_score
    assert large.questions[CONFIG].regret > 0.05


@pytest.mark.parametrize("seed", range(5))
def test_a_useless_model_gets_next_to_nothing(seed: int) -> None:
    assert fitted(evidence(0.0, seed=seed)).weights["pooled"].mean < 0.03


@pytest.mark.parametrize("seed", range(3))
def test_a_hostile_model_gets_nothing(seed: int) -> None:
    found = fitted(evidence(-0.8, seed=seed))
    assert found.weights == {"pooled": BlendWeight()}
    assert found.questions[CONFIG].mean == found.questions[CONFIG].log_score == 0.0


def test_one_that_says_the_same_of_every_candidate_has_no_news() -> None:
    flat = [replace(e, gap=-e.believed) for e in evidence(0.0)]
    assert fitted(flat).weights["pooled"].mean == 0.0


def test_what_gains_no_more_than_rounding_is_not_followed() -> None:
    scores = 1e-16 * np.random.default_rng(0).standard_normal((12, 201))
    assert pooled_weight(scores, [f"f{n % 4}" for n in range(12)]).mean == 0.0


def test_skill_in_sources_alone_is_followed_there() -> None:
    found = fitted(evidence(0.0), evidence(1.0, noise=0.3, question=SOURCE, seed=1, prefix="g"))
    assert found.questions[SOURCE].mean > 0.5
    assert found.questions[CONFIG].mean < 0.2 * found.questions[SOURCE].mean
    assert (found.questions[SOURCE].problems, found.questions[SOURCE].families) == (45, 15)


def test_a_kind_with_few_data_goes_by_the_pooled_weight() -> None:
    one = evidence(-0.5, families=1, each=2, question=SOURCE, seed=1, prefix="g")
    found = fitted(evidence(0.8, noise=0.5), one)
    assert found.questions[SOURCE].mean == pytest.approx(found.weights["pooled"].mean, abs=1e-3)
    two = evidence(-0.5, families=6, question=SOURCE, seed=1, prefix="g")
    assert fitted(evidence(0.8, noise=0.5), two).questions[SOURCE].mean < 0.3 * found.questions[SOURCE].mean


def test_a_weight_is_fitted_for_what_is_left_after_measurements() -> None:
    later = [*evidence(0.3, known=3, seed=2), *evidence(0.0, known=5, seed=3)]
    none, few, many = fitted(evidence(0.8, noise=0.5), later).known
    assert none == 1.0
    assert 0.9 > few > many + 0.1
    assert fitted(evidence(0.8, noise=0.5)).known == ()


def test_what_is_reported_of_a_family_is_fitted_without_it() -> None:
    """Turned around, a family changes every weight but its own."""
    plain = evidence(0.5)
    turned = [replace(e, gap=-e.gap) if e.family == "f0" else e for e in plain]
    weights = []
    for rows in (plain, turned):
        scores, names = log_scores(rows), [e.family for e in rows]
        weights.append(pooled_weight(scores, names))
    before, after = weights
    assert after.without["f1"] < before.without["f1"]
    # How much of the others' weight counts is common to all.
    assert after.without["f0"] <= before.without["f0"]


def test_a_group_never_leaves_the_range_between_its_own_and_the_pooled_weight() -> None:
    rows = evidence(0.5, families=4)
    scores, names = log_scores(rows), [e.family for e in rows]
    own = pooled_weight(scores, names).mean
    for base in (0.0, 1.0):
        found = group_weight(scores, names, CrossValidatedWeight(base, {}))
        assert min(own, base) - 0.01 <= found.mean <= max(own, base) + 0.01


def test_two_candidates_are_no_evidence() -> None:
    rows = np.array([True, True, False])
    assert fast_end(np.zeros(3), np.zeros(3), np.zeros(3), rows, family="f", kind="scan") is None


def played(family: str, needed: int, question: str) -> PairedReplay:
    return PairedReplay(family, "x", 0, 0.0, 0.0, 10, needed, 10, needed, question=question)


def test_what_is_saved_is_expected_by_kind_of_question() -> None:
    """No kind is refused for its error; one of a single family goes by all of them."""
    weights = {CONFIG: QuestionWeight(0.1), SOURCE: QuestionWeight(0.3), "no_ir": QuestionWeight(0.1)}
    rows = [played(f, n, CONFIG) for f, n in zip("abc", (9, 10, 9), strict=True)]
    rows += [played(f, n, SOURCE) for f, n in zip("def", (5, 6, 5), strict=True)]
    made, pooled = with_saving(LLMCalibration("m", questions=weights), rows)
    assert made.saved == pytest.approx(pooled.saved) == pytest.approx(1 - 44 / 60)
    assert made.saving(CONFIG) == pytest.approx((3 * (1 - 28 / 30) + pooled.saved) / 4, abs=1e-4)
    assert made.saving(SOURCE) > 0.4
    assert made.saving("no_ir") == pytest.approx(pooled.saved, abs=1e-4)


def test_the_table_tells_weights_counts_gains_and_latency() -> None:
    options: dict[str, Any] = {
        "weights": {"pooled": BlendWeight(0.2, 0.1)},
        "questions": {
            CONFIG: QuestionWeight(0.18, 0.1, 70, 20, 0.0123, 0.01, 0.04),
            SOURCE: QuestionWeight(0.31, 0.1, 9, 5, 0.05),
        },
        "known": (1.0, 0.8, 0.5),
        "saved": 0.05,
        "pace": ModelLatency(answer_s=0.034),
    }
    lines = _summary_text(LLMCalibration("m", **options), Path("c.json")).splitlines()
    assert lines[0] == "m: weight 0.20 beside the learned surrogate; saves 5% of the measurements"
    assert lines[1].split("  ")[0] == "question"
    assert lines[2].split() == ["config", "0.180", "70", "20", "0.0123", "4%"]
    assert lines[3].split() == ["source", "0.310", "9", "5", "0.0500"]
    assert lines[4].endswith("0.200, 0.160, 0.100")
    assert lines[5] == "an answer takes 0.034 s (median)"
    assert lines[6] == "written: c.json"
