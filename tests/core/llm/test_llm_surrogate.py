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
from forecast_autotune.surrogates.language_model.surrogate import (
    LLMForecasts,
    LLMSurrogate,
)
from forecast_autotune.testing import query_of
from tests.core.llm.words import TABLE, Said, calibrated, favours, same


def consult(model: LLMSurrogate, known: int = 0) -> LLMForecasts:
    query = query_of(TABLE, known)
    return model.consult(query, AnalyticSurrogate().prior(query))


def test_a_model_without_calibration_is_taken_at_its_word() -> None:
    answer = consult(LLMSurrogate(Said(favours(128))))
    _, sd, _ = BINS.moments(np.array([favours(128)("BLOCK=128 ")]))
    assert answer.sd[answer.trust.argmax()] == pytest.approx(sd[0])
    assert answer.doubts == ()


def test_the_calibration_corrects_means() -> None:
    corrected = replace(calibrated(), ratio=MonotoneCurve((0.0, 2.0), (0.0, 1.0)))
    plain, half = (consult(LLMSurrogate(Said(favours(16)), c)).log2_ms for c in (None, corrected))
    np.testing.assert_allclose(half - half.min(), (plain - plain.min()) / 2, atol=0.03)


def test_a_temperature_widens_without_reordering() -> None:
    plain, warm = (
        consult(LLMSurrogate(Said(favours(64)))),
        consult(LLMSurrogate(Said(favours(64)), replace(calibrated(), temperature=4.0))),
    )
    assert (warm.sd > plain.sd).all()
    assert (warm.trust < plain.trust).all()
    assert np.corrcoef(warm.log2_ms, plain.log2_ms)[0, 1] > 0.95


@pytest.mark.parametrize(
    ("change", "doubt"),
    [
        ({"device": Device("some other GPU", "cuda")}, "not calibrated on some other GPU"),
        ({"kernel": Kernel("k", language="cuda", source="x")}, "calibrated on kernels in triton"),
        ({"kernel": Kernel("k", source="x = 1\n" * 5000)}, "a prompt of"),
    ],
)
def test_what_lies_outside_of_the_calibration_is_not_believed(change: dict[str, object], doubt: str) -> None:
    query = query_of(TABLE)
    strange = replace(query, problem=replace(query.problem, **change))  # type: ignore[arg-type]
    model = LLMSurrogate(
        Said(favours(64)), replace(calibrated(), scope=replace(calibrated().scope, characters=1200))
    )
    base = AnalyticSurrogate()
    answer = model.consult(strange, base.prior(strange))
    assert not answer.usable
    assert any(doubt in d for d in answer.doubts)
    assert model.consult(query, base.prior(query)).usable


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


def test_its_version_names_model_prompt_and_calibration() -> None:
    plain, other = (
        LLMSurrogate(Said(same)),
        LLMSurrogate(Said(same), LLMCalibration("said", "forecast-2", temperature=2.0)),
    )
    assert "forecast-2-said" in plain.version
    assert plain.version != other.version
