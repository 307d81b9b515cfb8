"""Judgements of sources in the process: whole sources move, and the clock has the last word."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

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


def test_one_slow_config_takes_the_whole_source_back() -> None:
    base = timed(CANDIDATES[0], 1.0)
    unsure = {"one": SourceJudgement(-0.5, 0.5)}
    before = asked(unsure, (base,))[1]
    after = asked(unsure, (base, timed(CANDIDATES[4], 1.6)))[1]
    assert before["one"] < before["base"]
    assert after["one"] > after["base"]


def test_the_default_surrogate_follows_judgements() -> None:
    result = DefaultSurrogate().forecast(Query(PROBLEM, CANDIDATES, judgements=FASTER))
    assert int(np.argmin(result.mean)) in range(4, 8)
