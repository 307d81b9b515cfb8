"""What is reported of a model beside the learned surrogate, on answers that are known."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.llm.stacked_weights import COUNTS, direct_log2, evidence_of, figures
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.testing import example_table
from forecast_train.llm.calibration.stacking import CrossValidatedWeight, fast_end, log_scores, pooled_weight

TABLE = example_table((16, 32, 64, 128, 256, 512, 1024), (1, 2, 4, 8, 16))


def test_every_recorded_answer_is_about_a_problem_of_its_own() -> None:
    found = direct_log2()
    assert len(found) == len({kernel for kernel, _ in found.values()}) == 72
    assert min(len(told) for _, told in found.values()) >= 6


def test_an_answer_that_is_right_explains_what_the_learned_forecast_does_not() -> None:
    told = {
        json.dumps(m.candidate.to_json(), sort_keys=True): np.log2(m.ms) for m in TABLE.measurements if m.ok
    }
    found = evidence_of(TABLE, AnalyticSurrogate(), told)
    assert tuple(found) == COUNTS
    for count, one in found.items():
        before, after = one.squares(1.0)
        assert after < 0.2 * before
        assert one.known == count
    assert found[0].regret(1.0) == pytest.approx(0.0)
    with pytest.raises(ValueError, match="1 answers are about no candidate"):
        evidence_of(TABLE, AnalyticSurrogate(), {**told, "of nothing": 0.0})


def test_figures_are_those_of_families_left_out() -> None:
    generator, evidence = np.random.default_rng(0), []
    for number in range(12):
        learned, error = np.sort(generator.uniform(0, 1, 30)), 0.3 * generator.standard_normal(30)
        one = fast_end(
            learned + error, learned, error, np.ones(30, bool), family=f"f{number % 4}", kind="scan"
        )
        assert one is not None
        evidence.append(one)
    fitted = pooled_weight(log_scores(evidence), [e.family for e in evidence])
    assert fitted.mean > 0.9
    found = figures(evidence, fitted, fitted)
    assert found["stack"]["rmse"]["value"] < 0.05 < found["learned"]["rmse"]["value"]
    assert found["stack"]["log_score_difference"]["low"] > 0.0
    none = CrossValidatedWeight(0.0, dict.fromkeys(fitted.without, 0.0))
    assert figures(evidence, none, none)["stack"]["rmse"] == found["learned"]["rmse"]
