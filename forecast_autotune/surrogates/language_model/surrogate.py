"""Forecasts of a language model: asked, corrected by its calibration, silent where it should be."""

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
"""Spread (log2) of a candidate of which nothing was said."""


@dataclass(frozen=True)
class LLMForecasts:
    """Forecasts of a language model for n candidates; arrays of shape [n]."""

    log2_ms: Array
    """Calibrated means; their level is no better than that of the reference."""
    sd: Array
    p_fail: Array
    trust: Array
    """0 where it said nothing that can be used, near 1 where it was sure."""
    stated: Array
    """Probabilities as the model gave them, [n, labels]; rows of zeros where it gave none."""
    question: ForecastQuestion
    usage: Usage
    doubts: tuple[str, ...] = ()
    """Why all of it was discarded; empty when it was not."""

    @property
    def usable(self) -> bool:
        """Whether anything in it can be used."""
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

        `before` is what is believed of the query's candidates without the model: it is shown. The answer is the
        same whatever was measured of this problem, and may be updated by it.
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
        """The answer to a question, corrected, and silenced where it is out of the calibration's scope.

        Raises `LLMError` for an answer that cannot be one.
        """
        n, rows, prompt = len(query.candidates), question.rows, question.prompt
        stated = _validated_probabilities(answer.probabilities, len(rows), len(prompt.labels))
        mean, spread, fails = self.calibration.moments(stated)
        sure = self.calibration.trust(stated, np.asarray(answer.mass, float))
        answered = sure > 0
        doubts: list[str] = []
        if self.calibration.fitted:  # one that was never calibrated knows no bounds either
            longest = len(prompt.prefix) + max(map(len, prompt.suffixes))
            doubts = self.calibration.scope.doubts(query.problem, longest)
        if not answered.any():
            doubts.append("; ".join(answer.trouble) or "it gave the labels no probability")
        slow = float(mean[answered].max()) if answered.any() else 0.0
        view = LLMForecasts(
            np.full(n, question.log2_ms + slow),
            np.full(n, _SILENT_SD),
            before.p_fail.copy(),
            np.zeros(n),
            np.zeros((n, stated.shape[1])),
            question,
            answer.usage,
            tuple(doubts),
        )
        heard = rows[answered]
        view.stated[rows] = stated
        view.log2_ms[heard] = question.log2_ms + mean[answered]
        view.sd[heard], view.p_fail[heard] = spread[answered], fails[answered]
        if not doubts:
            view.trust[rows] = sure
        return view


def consultation(model: LLMSurrogate, view: LLMForecasts, weight: float = 1.0) -> LLMConsultation:
    """The record of an answer that was heard, or abstained."""
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
    """The part of an answer to keep about one candidate, so that it can be scored and calibrated later."""
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
    """The probabilities of an answer, if they can be that. Raises `LLMError` otherwise."""
    stated = np.asarray(probabilities, float)
    if stated.shape != (rows, labels):
        raise LLMError(f"an answer must have shape {(rows, labels)}, got {stated.shape}")
    total = stated.sum(axis=1)
    whole = np.isfinite(stated).all() and (stated >= -1e-9).all()
    if not whole or not ((np.abs(total - 1.0) < 1e-3) | (total == 0.0)).all():
        raise LLMError("the rows of an answer must be probabilities that sum to 1, or zeros")
    return np.asarray(np.clip(stated, 0.0, 1.0))
