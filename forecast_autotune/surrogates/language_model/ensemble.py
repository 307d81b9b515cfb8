"""The shipped surrogate and a language model together, where asking is worth its latency.

The model's disagreement with the learned forecast moves the prior mean that the Gaussian process starts from,
by the weight of the model's calibration, and is one more slope term of it (`surrogates.blend`): measurements correct
the weight, and where the two disagree the spread grows, so that the clock decides. The result is averaged
with the learned forecast alone, by how much better it explains this problem's measurements: a model
that is plainly wrong here is soon not heard any more. The model is asked once per decision, without this
problem's own measurements, as these are counted by the process. It answers in a thread while the first
candidates compile; without an answer in time, the learned forecast stands alone.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace

import numpy as np

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.llm.calibration import BlendWeight, CalibrationScope, LLMCalibration
from forecast_autotune.llm.gate import GateDecision, GateInputs, decide_asking
from forecast_autotune.llm.prompt import FORECAST_VERSION
from forecast_autotune.numerics import fast_median
from forecast_autotune.records import LLMConsultation
from forecast_autotune.records.table import latest_labels
from forecast_autotune.surrogates.blend import (
    BlendedSurrogate,
    disagreement,
    inclusion_probability,
    mix_forecasts,
)
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.surrogate import (
    LLMForecasts,
    LLMSurrogate,
    annotation_of,
    consultation,
)
from forecast_autotune.surrogates.prior import Prior
from forecast_autotune.surrogates.protocol import Forecasts, Query

Gate = Callable[[GateInputs], GateDecision]

_TRUST_VARIABLE = "FORECAST_AUTOTUNE_LLM_TRUST"
DEFAULT_WEIGHT = BlendWeight(0.5, 0.5)
"""Weight of an uncalibrated model that the user wants heard."""
_UNSEEN_COMPILE_S = 0.5
"""Seconds to compile a candidate of a kernel without measurements."""
_MAX_QUESTIONS = 8
"""Most questions in the queue, answered or not; a decision asks one."""
_MIN_INCLUSION = 0.01
"""Inclusion probability below which the model's part is left out."""
_MAX_FAILURES = 2
"""Failures in a row after which a process asks no more."""


@dataclass
class _PendingQuestion:
    """A question of one decision. Strong references, so that no other object can take their identity."""

    about: tuple[object, ...]
    answer: Future[LLMForecasts]
    worth: GateDecision
    known: int
    """Measurements of the problem when it was asked."""
    waited_s: float = 0.0
    """Seconds that the decision has waited for it."""
    started: float = field(default_factory=time.perf_counter)
    abandoned: bool = False
    """Whether its answer has taken too long, so that nobody waits for it any more."""

    def same(self, about: tuple[object, ...]) -> bool:
        """Whether this is the question of the same decision."""
        return all(a is b for a, b in zip(self.about, about, strict=True))

    @property
    def age_s(self) -> float:
        """Seconds since the question was asked."""
        return time.perf_counter() - self.started

    def done(self, wait_s: float) -> bool:
        """Whether there is an answer, or a failure, after waiting for at most `wait_s`."""
        begin = time.perf_counter()
        is_done = bool(wait((self.answer,), timeout=max(0.0, wait_s)).done)
        self.waited_s += time.perf_counter() - begin
        return is_done


class EnsembleSurrogate:
    """See the module. A pure function of the query while it waits for its answers (`patient`)."""

    name = "default"

    def __init__(
        self,
        plain: DefaultSurrogate,
        model: LLMSurrogate,
        *,
        workers: int = 16,
        patient: bool = False,
        gate: Gate = decide_asking,
    ) -> None:
        """`patient`: wait for every answer up to its limit, as if the model were loaded: for replays and evaluations,
        whose seconds are simulated."""
        self.plain, self.model, self.workers, self.patient, self.gate = plain, model, workers, patient, gate
        skilled = model.calibration.skilled
        self.version = f"{plain.version}+{model.version}" if skilled else plain.version
        self._mutex = threading.Lock()
        self._question_lock = threading.Lock()
        self._questions: deque[_PendingQuestion] = deque(maxlen=_MAX_QUESTIONS)
        self._answers_s: deque[float] = deque(maxlen=_MAX_QUESTIONS)
        """Seconds of the answers of this process."""
        self._failures = 0
        """Failures in a row."""
        self._warnings: set[str] = set()

    def forecast(self, query: Query) -> Forecasts:
        """Forecast all candidates of the query; never raises for a fault of the model."""
        query = replace(query, candidates=CandidateList.of(query.candidates))
        single = self.plain.single
        if query.provisional:
            return self.plain.forecast(query)
        if not isinstance(single, AnalyticSurrogate) or self.plain.pools_relatives(query):
            why = "dense tables of the same sizes answer, and outdo it"
            return with_consultation(self.plain.forecast(query), self._unasked(why))
        if not self.model.calibration.skilled:
            return with_consultation(self.plain.forecast(query), self._unasked(self._why_without_skill()))
        before = single.prior(query)
        answer = self._llm_forecasts(query, before)
        if isinstance(answer, LLMConsultation):
            return with_consultation(single.answer(query, before), answer)
        view, why = answer
        return self._blend(query, before, view, single, why)

    def _blend(
        self, query: Query, before: Prior, view: LLMForecasts, single: AnalyticSurrogate, why: str
    ) -> Forecasts:
        model, prior_mean = self.model, before.mean
        alone = single.answer(query, before)

        def note(row: int) -> Mapping[str, object]:
            notes = annotation_of(model, view, row)
            return {**notes, "learned_log2_ms": round(float(prior_mean[row]), 4)} if notes else notes

        def without(trouble: str) -> Forecasts:
            part = replace(consultation(model, view, 0.0), trouble=trouble, why=why)
            # Noted all the same: a calibration must see the model's errors as well.
            return replace(with_consultation(alone, part), note=note)

        weight = model.calibration.weight
        if not view.usable:
            return without("; ".join(view.doubts))
        gap = disagreement(prior_mean, view.log2_ms, view.trust, single.hyper)
        names = CandidateList.of(query.candidates)
        by_name = {names[int(i)]: float(gap[i]) for i in np.flatnonzero(gap)}
        blend = BlendedSurrogate(single, before.informed, by_name, weight)
        share = inclusion_probability(query, blend, blend.without_llm())
        if share < _MIN_INCLUSION:
            return without("its forecasts were refuted by measurements")
        part = replace(consultation(model, view, share * weight.mean), why=why)
        blend_forecasts = blend.answer(query, blend.prior(query))
        mixture = with_consultation(mix_forecasts(blend_forecasts, alone, share), part)
        # Drawn with the mixture's random numbers: else a lucky draw would pass for the model's effect.
        without_llm = replace(alone, sampler=mix_forecasts(alone, alone, share).sampler)
        return replace(mixture, note=note, without_llm=without_llm)

    def _unasked(self, why: str) -> LLMConsultation:
        return LLMConsultation(self.model.backend.name, FORECAST_VERSION, asked=False, why=why)

    def _llm_forecasts(self, query: Query, before: Prior) -> tuple[LLMForecasts, str] | LLMConsultation:
        """The model's answer with the reason for asking; or the reason why there is none, or none yet."""
        about = (query.problem, query.candidates, query.relatives, query.ttir)
        with self._mutex:
            question = next((q for q in self._questions if q.same(about)), None)
            if question is None:
                if not all(q.answer.done() for q in self._questions):
                    # Questions of finished decisions would queue behind a model that loads, or hangs.
                    return self._unasked("it is still busy with an earlier question")
                if self._failures >= _MAX_FAILURES:
                    return self._unasked(f"it failed {self._failures} times in a row")
                worth = self.gate(self._situation(query))
                if not worth.ask:
                    return self._unasked(worth.reason)
                question = _PendingQuestion(
                    about, self._start_question(query, before), worth, len(query.measured)
                )
                self._questions.append(question)
        return self._await_answer(question, query)

    def _await_answer(
        self, question: _PendingQuestion, query: Query
    ) -> tuple[LLMForecasts, str] | LLMConsultation:
        worth, limit = question.worth, self.model.timeout_s
        rest_s = limit - question.age_s
        last = self.patient or query.once
        # Nobody waits before the first candidates are measured, and never longer than the answer is worth.
        has_rows = len(query.measured) > question.known
        patience = rest_s if last else min(rest_s, worth.worth_s - question.waited_s) if has_rows else 0.0
        if not question.abandoned and question.done(patience):
            if (error := question.answer.exception()) is None:
                return question.answer.result(), worth.reason
            return self._failed(question, f"it failed: {error}")
        if question.abandoned or last or question.age_s >= limit:
            question.abandoned = True
            return self._failed(question, f"no answer within {limit:g} s")
        return self._unheard(question, "asked, not answered yet")

    def _unheard(self, question: _PendingQuestion, trouble: str) -> LLMConsultation:
        return LLMConsultation(
            self.model.backend.name,
            FORECAST_VERSION,
            seconds=question.age_s,
            trouble=trouble,
            why=question.worth.reason,
        )

    def _failed(self, question: _PendingQuestion, trouble: str) -> LLMConsultation:
        name = self.model.backend.name
        if trouble not in self._warnings:
            self._warnings.add(trouble)
            warnings.warn(
                f"language model {name}: {trouble}; decisions go on without it. Raise "
                "FORECAST_AUTOTUNE_LLM_TIMEOUT where it is slow; FORECAST_AUTOTUNE_LLM= asks none",
                stacklevel=2,
            )
        return self._unheard(question, trouble)

    def _start_question(self, query: Query, before: Prior) -> Future[LLMForecasts]:
        """Ask in a thread. It is a daemon: a model that hangs must not keep the process from ending."""
        model, backend = self.model, self.model.backend
        answer: Future[LLMForecasts] = Future()

        def work() -> LLMForecasts:
            # One question at a time: two would share a device and time out together.
            with self._question_lock:
                try:
                    if not backend.ready():
                        backend.prepare()
                    view = model.consult(query, before)
                except Exception:
                    self._failures += 1
                    raise
                self._failures = 0
                if view.usage.seconds:
                    self._answers_s.append(view.usage.seconds)
                return view

        def run() -> None:
            try:
                answer.set_result(work())
            except Exception as error:  # a model must never take a decision down
                answer.set_exception(error)

        threading.Thread(target=run, name="forecast-llm", daemon=True).start()
        return answer

    def _situation(self, query: Query) -> GateInputs:
        calibration = self.model.calibration
        count = len(latest_labels(query.measured))
        seconds = [m.compile_s for r in query.relatives for m in r.measurements if m.compile_s is not None]
        return GateInputs(
            candidates=max(0, len(query.candidates) - count),
            workers=self.workers,
            compile_s=float(fast_median(np.array(seconds), axis=0)) if seconds else _UNSEEN_COMPILE_S,
            saved=calibration.saved,
            answer_s=self._answer_s(),
            once=query.once,
            timeout_s=self.model.timeout_s,
        )

    def _answer_s(self) -> float:
        """Median seconds of the answers of this process, else of those of the calibration."""
        if self._answers_s and not self.patient:
            return float(fast_median(np.array(self._answers_s), axis=0))
        return self.model.calibration.pace.answer_s

    def _why_without_skill(self) -> str:
        calibration, name = self.model.calibration, self.model.backend.name
        if calibration.fitted:
            return "its calibration found no skill in it"
        text = "it is not calibrated: `forecast-autotune train calibrate-llm` says what it is worth"
        if text not in self._warnings:
            self._warnings.add(text)
            warnings.warn(
                f"language model {name}: {text}; until then it is not asked "
                "(FORECAST_AUTOTUNE_LLM_TRUST=always asks it)",
                stacklevel=2,
            )
        return text


def forced_trust(calibration: LLMCalibration, stated: float | None = None) -> tuple[LLMCalibration, Gate]:
    """The calibration without any scope, and a gate that is always open: an answer is worth any second in the limit.

    `stated` is the user's weight; without it, `DEFAULT_WEIGHT` stands where the calibration has none.
    """
    why = f"{_TRUST_VARIABLE}=always"
    if stated is not None:
        weight, why = BlendWeight(stated, stated), "as its weight is stated"
    elif calibration.skilled:
        weight = calibration.weight
    else:
        weight = DEFAULT_WEIGHT
        state = "its calibration found no skill in it" if calibration.fitted else "not calibrated"
        why += f"; {state}: default weight {weight.mean:g}"

    def ask(situation: GateInputs) -> GateDecision:
        return GateDecision(True, situation.timeout_s, why)

    scope = CalibrationScope(mass=calibration.scope.mass)
    return replace(calibration, weight=weight, scope=scope), ask


class UnaskedModelSurrogate:
    """`plain`, with the reason in all its forecasts why the language model was not asked."""

    def __init__(self, plain: DefaultSurrogate, model: str, why: str) -> None:
        self.plain, self.name, self.version = plain, plain.name, plain.version
        self.part = LLMConsultation(model, asked=False, why=why)

    def forecast(self, query: Query) -> Forecasts:
        """The forecast of `plain`."""
        forecasts = self.plain.forecast(query)
        return forecasts if query.provisional else with_consultation(forecasts, self.part)


def with_consultation(forecasts: Forecasts, part: LLMConsultation) -> Forecasts:
    """The forecasts with a model's part, also in their reason."""
    return replace(forecasts, reason=f"{forecasts.reason}; {part}", consultation=part)
