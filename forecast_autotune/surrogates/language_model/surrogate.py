"""Forecasts of a language model, corrected by its calibration; none where the model should not be heard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from forecast_autotune.llm.backend import Backend, BackendResponse, LLMError, Usage
from forecast_autotune.llm.calibration import LLMCalibration
from forecast_autotune.llm.prompt import FORECAST_VERSION
from forecast_autotune.records import LLMConsultation
from forecast_autotune.surrogates.language_model.questions import (
    ForecastQuestion,
    build_formula_question,
    select_candidates,
)
from forecast_autotune.surrogates.prior import Prior
from forecast_autotune.surrogates.protocol import Array, Query

_SILENT_SD = 3.0
"""Spread (log2) of a candidate without an answer."""


@dataclass(frozen=True)
class LLMForecasts:
    """Forecasts of a language model for n candidates; arrays of shape [n]."""

    log2_ms: Array
    """Calibrated means; their level is no better than that of the reference."""
    sd: Array
    p_fail: Array
    trust: Array
    """0 where there is no usable answer, near 1 where the model was sure."""
    stated: Array
    """The model's own probabilities, [n, labels]; rows of zeros where there are none."""
    question: ForecastQuestion
    usage: Usage
    doubts: tuple[str, ...] = ()
    """Why the whole answer was discarded; empty when it was not."""

    @property
    def usable(self) -> bool:
        """Whether any candidate has a usable answer."""
        return bool((self.trust > 0).any())


class LLMSurrogate:
    """A model with its calibration. A pure function of the query as far as its backend is."""

    def __init__(
        self, backend: Backend, calibration: LLMCalibration | None = None, *, timeout_s: float = 30.0
    ) -> None:
        self.backend = backend
        self.calibration = calibration or LLMCalibration(backend.name, FORECAST_VERSION)
        self.timeout_s = timeout_s
        self.version = f"{FORECAST_VERSION}-{backend.name}-{self.calibration.mark()}"

    def consult(self, query: Query, before: Prior) -> LLMForecasts:
        """Ask, and correct the answer. Raises `LLMError`, and whatever a faulty backend raises.

        `before` is the prior without the model, which the question shows. The answer does not depend on this
        problem's measurements, and may be updated by them.
        """
        rows = select_candidates(before, before.mean)
        question = build_formula_question(query, among=rows, believed=before.mean)
        prompt = question.prompt
        answer = self.backend.forecast(
            prompt.prefix, prompt.suffixes, prompt.labels, timeout_s=self.timeout_s
        )
        return self.interpret(query, before, question, answer)

    def interpret(
        self, query: Query, before: Prior, question: ForecastQuestion, answer: BackendResponse
    ) -> LLMForecasts:
        """The answer to a question, corrected, with no trust where it is out of the calibration's scope.

        Raises `LLMError` for a malformed answer.
        """
        n, rows, prompt = len(query.candidates), question.rows, question.prompt
        probabilities = _validated_probabilities(answer.probabilities, len(rows), len(prompt.labels))
        mean, spread, fails = self.calibration.moments(probabilities)
        sure = self.calibration.trust(probabilities, np.asarray(answer.mass, float))
        has_answer = sure > 0
        doubts: list[str] = []
        if self.calibration.fitted:  # one that was never calibrated knows no bounds either
            longest = len(prompt.prefix) + max(map(len, prompt.suffixes))
            doubts = self.calibration.scope.doubts(query.problem, longest)
        if not has_answer.any():
            doubts.append("; ".join(answer.trouble) or "it gave the labels no probability")
        slow = float(mean[has_answer].max()) if has_answer.any() else 0.0
        view = LLMForecasts(
            np.full(n, question.log2_ms + slow),
            np.full(n, _SILENT_SD),
            before.p_fail.copy(),
            np.zeros(n),
            np.zeros((n, probabilities.shape[1])),
            question,
            answer.usage,
            tuple(doubts),
        )
        answer_rows = rows[has_answer]
        view.stated[rows] = probabilities
        view.log2_ms[answer_rows] = question.log2_ms + mean[has_answer]
        view.sd[answer_rows], view.p_fail[answer_rows] = spread[has_answer], fails[has_answer]
        if not doubts:
            view.trust[rows] = sure
        return view


def consultation(model: LLMSurrogate, view: LLMForecasts, weight: float = 1.0) -> LLMConsultation:
    """The record of an answer, or of an abstention."""
    usage, abstained = view.usage, not view.usable
    return LLMConsultation(
        model.backend.name,
        view.question.prompt.version,
        model.calibration.mark(),
        0.0 if abstained else weight,
        usage.prompt_tokens + usage.output_tokens,
        usage.seconds,
        usage.money,
        "; ".join(view.doubts) if abstained else "",
    )


def annotation_of(model: LLMSurrogate, view: LLMForecasts, row: int) -> Mapping[str, object]:
    """The part of an answer to store with one candidate's measurement, for scores and calibrations."""
    if view.stated[row].sum() < 0.5:
        return {}
    return {
        "llm": {
            "model": model.backend.name,
            "prompt": view.question.prompt.version,
            "stated": [round(float(p), 4) for p in view.stated[row]],
            "reference": view.question.against,
            "reference_log2_ms": round(view.question.log2_ms, 4),
        }
    }


def _validated_probabilities(probabilities: Array, rows: int, labels: int) -> Array:
    """The probabilities of an answer. Raises `LLMError` where they are none."""
    result = np.asarray(probabilities, float)
    if result.shape != (rows, labels):
        raise LLMError(f"an answer must have shape {(rows, labels)}, got {result.shape}")
    total = result.sum(axis=1)
    whole = np.isfinite(result).all() and (result >= -1e-9).all()
    if not whole or not ((np.abs(total - 1.0) < 1e-3) | (total == 0.0)).all():
        raise LLMError("the rows of an answer must be probabilities that sum to 1, or zeros")
    return np.asarray(np.clip(result, 0.0, 1.0))
