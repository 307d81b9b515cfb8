"""A language model as a surrogate: what it says, what is done to it, and when it is silent."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from forecast_autotune.llm.backend import BackendResponse, LLMError
from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.calibration import LLMCalibration, MonotoneCurve
from forecast_autotune.records import Device, Kernel
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.surrogate import SILENT_SD, LLMForecasts, LLMSurrogate
from forecast_autotune.testing import SurrogateContract, query_of
from tests.core.llm.words import TABLE, Said, calibrated, favours, nothing, same


class TestLLM(SurrogateContract):
    def make(self) -> LLMSurrogate:
        return LLMSurrogate(Said(favours(128)))


class TestSilentLLM(SurrogateContract):
    def make(self) -> LLMSurrogate:
        return LLMSurrogate(Said(nothing))


class TestBrokenLLM(SurrogateContract):
    def make(self) -> LLMSurrogate:
        return LLMSurrogate(Said(favours(128), error=RuntimeError("out of memory")))


def consult(model: LLMSurrogate, known: int = 0) -> LLMForecasts:
    query = query_of(TABLE, known)
    return model.consult(query, model.base.prior(query))


def test_it_says_what_the_model_says_in_milliseconds_of_the_reference() -> None:
    forecasts = LLMSurrogate(Said(favours(128))).forecast(query_of(TABLE, 5))
    assert forecasts.reason == f"{len(TABLE.by_candidate())} candidates forecast by said"
    sizes = np.array([dict(c.config.kwargs)["BLOCK"] for c in forecasts.candidates])
    open_rows = np.arange(len(sizes)) >= 5
    best = forecasts.mean[(sizes == 128) & open_rows]
    reference = math.log2(min(m.ms for m in TABLE.measurements[:5] if m.ok))
    np.testing.assert_allclose(best, reference, atol=0.05)
    np.testing.assert_allclose(forecasts.mean[(sizes == 512) & open_rows] - best[0], 1.0, atol=0.1)


def test_what_is_measured_counts_as_it_is() -> None:
    forecasts = LLMSurrogate(Said(favours(1024))).forecast(query_of(TABLE, 35))
    truth = np.array(TABLE.log2_ms())
    ran = np.isfinite(truth)
    np.testing.assert_allclose(forecasts.mean[ran], truth[ran])
    np.testing.assert_array_equal(forecasts.p_fail, np.where(ran, 0.0, 1.0))


def test_a_model_without_calibration_is_taken_at_its_word() -> None:
    said = consult(LLMSurrogate(Said(favours(128))))
    _, sd, _ = BINS.moments(np.array([favours(128)("BLOCK=128 ")]))
    assert said.sd[said.trust.argmax()] == pytest.approx(sd[0])
    assert said.doubts == ()


def test_the_calibration_corrects_mean_failures_and_intervals() -> None:
    cal = replace(
        calibrated(),
        ratio=MonotoneCurve((0.0, 2.0), (0.0, 1.0)),
        fails=MonotoneCurve((0.0, 1.0), (0.25, 0.75)),
        intervals={TABLE.problem.device.slug: (2.0, 2.0, 2.0, 2.0)},
    )
    query = query_of(TABLE)
    plain, corrected = (
        LLMSurrogate(Said(favours(16))).forecast(query),
        LLMSurrogate(Said(favours(16)), cal).forecast(query),
    )
    slow = plain.mean - plain.mean.min()
    np.testing.assert_allclose(corrected.mean - corrected.mean.min(), slow / 2, atol=0.03)
    assert corrected.p_fail.min() >= 0.25
    assert corrected.interval_factors == (2.0, 2.0, 2.0, 2.0)


def test_a_temperature_widens_without_reordering() -> None:
    plain, warm = (
        consult(LLMSurrogate(Said(favours(64)))),
        consult(LLMSurrogate(Said(favours(64)), replace(calibrated(), temperature=4.0))),
    )
    assert (warm.sd > plain.sd).all()
    assert (warm.trust < plain.trust).all()
    assert np.corrcoef(warm.log2_ms, plain.log2_ms)[0, 1] > 0.95


def test_vague_answers_are_trusted_less_than_sure_ones() -> None:
    vague, sure = consult(LLMSurrogate(Said(favours(64, 1.0)))), consult(LLMSurrogate(Said(favours(64, 0.1))))
    assert vague.trust.max() < 0.5 < sure.trust.min()


def test_an_answer_that_gives_the_labels_no_mass_is_none() -> None:
    cal = calibrated()
    assert consult(LLMSurrogate(Said(favours(64), mass=0.11), cal)).usable
    silent = LLMSurrogate(Said(favours(64), mass=0.09), cal)
    assert not consult(silent).usable
    assert (silent.forecast(query_of(TABLE)).sd == SILENT_SD).all()


def test_missing_rows_are_silent_and_the_others_are_not() -> None:
    """A row of zeros is an abstention: it defers, and no other row suffers for it."""
    half = Said(lambda s: nothing(s) if "BLOCK=64 " in s else favours(128)(s))
    said = consult(LLMSurrogate(half))
    gone = np.array(["BLOCK=64 " in f"{c.config} " for c in TABLE.by_candidate()])
    assert (said.trust[gone] == 0).all()
    assert (said.trust[~gone] > 0).all()
    forecasts = LLMSurrogate(half).forecast(query_of(TABLE))
    assert forecasts.sd[gone].min() > forecasts.sd[~gone].max()


@pytest.mark.parametrize(
    ("change", "doubt"),
    [
        ({"device": Device("some other GPU", "cuda")}, "not calibrated on some other GPU"),
        ({"kernel": Kernel("k", language="cuda", source="x")}, "calibrated on kernels in triton"),
        ({"kernel": Kernel("k", source="x = 1\n" * 5000)}, "a prompt of"),
    ],
)
def test_what_lies_outside_of_the_calibration_is_not_believed(change: dict[str, object], doubt: str) -> None:
    model = LLMSurrogate(Said(favours(64)), calibrated())
    query = query_of(TABLE)
    strange = replace(query, problem=replace(query.problem, **change))  # type: ignore[arg-type]
    model = LLMSurrogate(
        Said(favours(64)), replace(calibrated(), scope=replace(calibrated().scope, characters=1200))
    )
    said = model.consult(strange, model.base.prior(strange))
    assert not said.usable
    assert any(doubt in d for d in said.doubts)
    assert doubt in model.forecast(strange).reason
    assert model.consult(query, model.base.prior(query)).usable


def test_a_model_that_cannot_tell_candidates_apart_forecasts_them_alike() -> None:
    forecasts = LLMSurrogate(Said(same)).forecast(query_of(TABLE))
    assert np.ptp(forecasts.mean) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        np.zeros((2, 16)),
        np.full((35, 16), 0.5),
        np.full((35, 16), math.nan),
        np.full((35, 3), 1 / 3),
        np.array([[2.0, -1.0, *[0.0] * 14]] * 35),
    ],
)
def test_answers_that_are_no_probabilities_are_refused(answer: np.ndarray) -> None:  # type: ignore[type-arg]
    class Liar(Said):
        def forecast(self, *args: object, **options: object) -> BackendResponse:
            return BackendResponse(answer, np.ones(len(answer)))

    model = LLMSurrogate(Liar(same))
    with pytest.raises(LLMError):
        consult(model)
    assert (model.forecast(query_of(TABLE)).sd == SILENT_SD).all()


def test_a_failure_is_said_and_contained() -> None:
    forecasts = LLMSurrogate(Said(same, error=LLMError("no route to the server"))).forecast(
        query_of(TABLE, 3)
    )
    assert "no route to the server" in forecasts.reason
    assert np.isfinite(forecasts.mean).all()


def test_what_was_said_is_kept_with_each_candidate() -> None:
    backend = Said(favours(128))
    query = query_of(TABLE)
    forecasts = LLMSurrogate(backend).forecast(query)
    note = forecasts.note(3)["llm"]
    assert isinstance(note, dict)
    text = f"BLOCK={dict(query.candidates[3].config.kwargs)['BLOCK']} "
    np.testing.assert_allclose(note["stated"], favours(128)(text), atol=1e-4)
    assert note["model"] == "said"
    assert note["reference"] in {c.id for c in query.candidates}
    part = forecasts.consultation
    assert part is not None
    assert (part.model, part.trouble) == ("said", "")
    assert part.tokens > 100
    assert part.seconds == 0.01


def test_nothing_is_kept_of_a_candidate_that_was_not_answered() -> None:
    assert LLMSurrogate(Said(nothing)).forecast(query_of(TABLE)).note(3) == {}


def test_its_version_names_model_prompt_and_calibration() -> None:
    plain, other = (
        LLMSurrogate(Said(same)),
        LLMSurrogate(Said(same), LLMCalibration("said", "forecast-2", temperature=2.0)),
    )
    assert "forecast-2-said" in plain.version
    assert plain.version != other.version


def test_hopeless_candidates_stay_hopeless_although_nobody_asked() -> None:
    query = query_of(TABLE)
    model = LLMSurrogate(Said(favours(64)))
    before = replace(AnalyticSurrogate().prior(query), p_fail=np.where(np.arange(35) == 7, 0.95, 0.01))
    said = model.consult(query, before)
    assert said.trust[7] == 0.0
    assert said.p_fail[7] == 0.95
