"""Judgements of sources in the process: whole sources move, and the clock has the last word."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.records import Candidate, Config, Device, Kernel, Measurement, Outcome, Problem
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.judged import JudgementWeights, judged_forecasts
from forecast_autotune.surrogates.protocol import Forecasts, Query
from forecast_autotune.variants.records import SourceJudgement

PROBLEM = Problem.of(Kernel("k"), [], Device("NVIDIA H200", "cuda", "90"))
VARIANTS = ("base", "one", "two")
CANDIDATES = CandidateList.of(
    [Candidate(Config.of({"BLOCK": b}, num_warps=4), v) for v in VARIANTS for b in (32, 64, 128, 256)]
)
FASTER = {"one": SourceJudgement(-0.5, 0.05)}


def timed(candidate: Candidate, ms: float) -> Measurement:
    return Measurement(PROBLEM.id, candidate, Outcome.OK, ms)


def asked(
    judgements: Mapping[str, SourceJudgement], measured: tuple[Measurement, ...] = ()
) -> tuple[Forecasts, dict[str, float]]:
    """Forecasts, and the mean of each source's."""
    query = Query(PROBLEM, CANDIDATES, measured=measured, judgements=judgements)
    result = judged_forecasts(AnalyticSurrogate(), query)
    names = np.array([c.variant for c in CANDIDATES])
    return result, {v: float(result.mean[names == v].mean()) for v in VARIANTS}


def test_all_configs_of_a_source_that_is_judged_faster_move_together() -> None:
    result, level = asked(FASTER)
    assert level["base"] - level["one"] == pytest.approx(JudgementWeights().judged * 0.5)
    assert level["two"] == pytest.approx(level["base"])
    assert np.ptp(result.mean[4:8]) == pytest.approx(0.0)
    assert "1 sources judged" in result.reason


def test_what_was_not_judged_is_forecast_as_ever() -> None:
    query = Query(PROBLEM, CANDIDATES, measured=(timed(CANDIDATES[0], 1.0), timed(CANDIDATES[5], 0.7)))
    plain = AnalyticSurrogate().forecast(query)
    for judgements in ({}, {"another": SourceJudgement(-1.0, 0.1)}):
        result = judged_forecasts(AnalyticSurrogate(), Query(**{**vars(query), "judgements": judgements}))
        assert np.array_equal(result.mean, plain.mean)
        assert np.array_equal(result.sd, plain.sd)


def test_one_slow_config_takes_the_whole_source_back() -> None:
    base = timed(CANDIDATES[0], 1.0)
    unsure = {"one": SourceJudgement(-0.5, 0.5)}
    before = asked(unsure, (base,))[1]
    after = asked(unsure, (base, timed(CANDIDATES[4], 1.6)))[1]
    assert before["one"] < before["base"]
    assert after["one"] > after["base"]


def test_who_is_sure_is_followed_longer() -> None:
    rows = (timed(CANDIDATES[0], 1.0), timed(CANDIDATES[4], 1.3))
    sure = asked({"one": SourceJudgement(-0.5, 0.01)}, rows)[0]
    unsure = asked({"one": SourceJudgement(-0.5, 2.0)}, rows)[0]
    # Of the source's other configs, as one of them was slow.
    assert sure.mean[5] < unsure.mean[5]


def test_the_default_surrogate_follows_judgements() -> None:
    result = DefaultSurrogate().forecast(Query(PROBLEM, CANDIDATES, judgements=FASTER))
    assert int(np.argmin(result.mean)) in range(4, 8)


@pytest.mark.parametrize("figures", [(float("nan"), 0.1, 0.0), (0.0, 0.0, 0.0), (0.0, 0.1, 1.5)])
def test_figures_out_of_range_are_no_judgement(figures: tuple[float, float, float]) -> None:
    with pytest.raises(RecordError, match="a judgement of a source needs"):
        SourceJudgement(*figures)
