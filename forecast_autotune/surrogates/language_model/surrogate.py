"""A language model as a surrogate: asked for bins, corrected by its calibration, silent where it should be.

`LLMSurrogate.consult` is what it says of a query's candidates, and how far each word can be trusted; an ensemble starts
from that. Alone (`LLMSurrogate.forecast`), it answers with nothing but its own words and what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.llm.backend import Backend, BackendResponse, LLMError, Usage
from forecast_autotune.llm.calibration import LLMCalibration
from forecast_autotune.llm.prompt import FORECAST_VERSION
from forecast_autotune.llm.similarity import kernel_kind, problem_features
from forecast_autotune.records import LLMConsultation
from forecast_autotune.records.table import latest_labels
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.questions import (
    ForecastQuestion,
    build_formula_question,
    select_candidates,
)
from forecast_autotune.surrogates.prior import Prior
from forecast_autotune.surrogates.protocol import Array, Forecasts, Query

Rows = npt.NDArray[np.intp]

SILENT_SD = 3.0
"""Spread (log2) of a candidate of which nothing was said."""
LEVEL_SD = 2.0
"""Spread (log2) of the level of a problem of which nothing was measured."""
_MEASURED_SD = 0.02
_BASE_FAILURE_RATE = 0.03


@dataclass(frozen=True)
class LLMForecasts:
    """What a language model says of n candidates; arrays of shape [n]."""

    log2_ms: Array
    """Calibrated means; their level is no better than that of the reference."""
    sd: Array
    p_fail: Array
    trust: Array
    """0 where it said nothing that can be used, near 1 where it was sure."""
    stated: Array
    """Probabilities as the model gave them, [n, labels]; rows of zeros where it gave none."""
    question: ForecastQuestion
    kind: str
    distance: float
    """From the kernels that the calibration was fitted to."""
    usage: Usage
    doubts: tuple[str, ...] = ()
    """Why all of it was discarded; empty when it was not."""

    @property
    def usable(self) -> bool:
        """Whether anything in it can be used."""
        return bool((self.trust > 0).any())


class LLMSurrogate:
    """See the module. A pure function of the query as far as its backend is."""

    name = "llm"

    def __init__(
        self,
        backend: Backend,
        calibration: LLMCalibration | None = None,
        *,
        base: AnalyticSurrogate | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """`base` says what is believed without the model: what its formula reads is shown."""
        self.backend = backend
        self.calibration = calibration or LLMCalibration(backend.name, FORECAST_VERSION)
        self.base = base or AnalyticSurrogate()
        self.timeout_s = timeout_s
        self.version = f"{FORECAST_VERSION}-{backend.name}-{self.calibration.mark()}"

    def forecast(self, query: Query) -> Forecasts:
        """Forecast with the model's words alone; own measurements are shown to it, and count as they are.

        A model that fails or abstains leaves equal forecasts that defer to the clock.
        """
        query = replace(query, candidates=CandidateList.of(query.candidates))
        try:
            view = self.consult(query, self.base.prior(query))
        except Exception as error:
            return self._to_forecasts(query, None, f"language model: {error}")
        why = (
            "; ".join(view.doubts)
            or f"{int((view.trust > 0).sum())} candidates forecast by {self.backend.name}"
        )
        return self._to_forecasts(query, view if view.usable else None, why, consultation(self, view))

    def consult(self, query: Query, before: Prior, *, own: bool = True) -> LLMForecasts:
        """Ask, and correct the answer. Raises `LLMError`, and whatever a faulty backend raises.

        `before` is what `base` believes of the query's candidates. Without `own`, the answer is the same
        whatever was measured of this problem, and may be updated by it.
        """
        rows = select_candidates(before, before.mean)
        asked = build_formula_question(query, own=own, among=rows, believed=before.mean)
        prompt = asked.prompt
        answer = self.backend.forecast(
            prompt.prefix, prompt.suffixes, prompt.labels, timeout_s=self.timeout_s
        )
        return self.interpret(query, before, asked, answer)

    def interpret(
        self, query: Query, before: Prior, asked: ForecastQuestion, answer: BackendResponse
    ) -> LLMForecasts:
        """The answer to a question, corrected, and silenced where it is out of the calibration's scope.

        Raises `LLMError` for an answer that cannot be one.
        """
        n, rows = len(query.candidates), asked.rows
        stated = _validated_probabilities(answer.probabilities, len(rows), len(asked.prompt.labels))
        mean, spread, fails = self.calibration.moments(stated)
        sure = self.calibration.trust(stated, np.asarray(answer.mass, float))
        told = sure > 0
        place = problem_features(before.facts, before.costs, query.candidates, query.problem.device)
        distance = self.calibration.scope.map.distance(place)
        doubts: list[str] = []
        if self.calibration.scope.languages:  # one that was never calibrated knows no bounds either
            longest = len(asked.prompt.prefix) + max(map(len, asked.prompt.suffixes))
            doubts = self.calibration.scope.doubts(query.problem, longest, distance)
        if not told.any():
            doubts.append("; ".join(answer.trouble) or "it gave the labels no probability")
        slow = float(mean[told].max()) if told.any() else 0.0
        found = LLMForecasts(
            np.full(n, asked.log2_ms + slow),
            np.full(n, SILENT_SD),
            before.p_fail.copy(),
            np.zeros(n),
            np.zeros((n, stated.shape[1])),
            asked,
            kernel_kind(before.facts),
            distance,
            answer.usage,
            tuple(doubts),
        )
        heard = rows[told]
        found.stated[rows] = stated
        found.log2_ms[heard] = asked.log2_ms + mean[told]
        found.sd[heard], found.p_fail[heard] = spread[told], fails[told]
        if not doubts:
            found.trust[rows] = sure
        return found

    def _to_forecasts(
        self, query: Query, view: LLMForecasts | None, reason: str, part: LLMConsultation | None = None
    ) -> Forecasts:
        n = len(query.candidates)
        row = CandidateList.of(query.candidates).row_of
        labels = {
            row[c]: m for c, m in latest_labels(query.measured).items() if c in row and m.outcome.is_label
        }
        ran = {i: math.log2(m.ms) for i, m in labels.items() if m.ok}
        if view is None:
            level = float(np.median(list(ran.values()))) if ran else 0.0
            mean, sd, p_fail = np.full(n, level), np.full(n, SILENT_SD), np.full(n, _BASE_FAILURE_RATE)
            common, factors = 0.0, None
        else:
            mean, p_fail = view.log2_ms.copy(), view.p_fail.copy()
            sd = np.where(view.trust > 0, np.maximum(view.sd, _MEASURED_SD), SILENT_SD)
            common = 0.0 if view.question.measured else LEVEL_SD
            factors = self.calibration.interval_factors(query.problem.device.slug)
        for i, m in labels.items():
            p_fail[i] = 0.0 if m.ok else 1.0
        for i, log2_ms in ran.items():
            mean[i], sd[i] = log2_ms, _MEASURED_SD

        def sample(rows: Rows, count: int, generator: np.random.Generator) -> Array:
            drawn = mean[rows] + sd[rows] * generator.standard_normal((count, len(rows)))
            return np.asarray(drawn + common * generator.standard_normal((count, 1)))

        found = Forecasts(
            query.candidates, mean, np.hypot(sd, common), p_fail, sample, reason, mean - 2 * sd - 2 * common
        )
        note = (lambda i: {}) if view is None else lambda i: annotation_of(self, view, i)
        found = replace(found, consultation=part, note=note)
        return found if factors is None else replace(found, interval_factors=factors)


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
    """What to keep of an answer about one candidate, so that it can be scored and calibrated later."""
    if view.stated[row].sum() < 0.5:
        return {}
    return {
        "llm": {
            "model": model.backend.name,
            "prompt": view.question.prompt.version,
            "stated": [round(float(p), 4) for p in view.stated[row]],
            "reference": view.question.against,
            "reference_log2_ms": round(view.question.log2_ms, 4),
            "kind": view.kind,
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
