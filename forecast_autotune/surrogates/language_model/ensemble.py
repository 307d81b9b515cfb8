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
"""How far a model that must be heard is followed where no calibration says."""
_UNSEEN_COMPILE_S = 0.5
"""Seconds to compile a candidate, where no measurement of the kernel says."""
_MAX_QUESTIONS = 8
"""Questions under way or answered that are remembered; a decision asks one."""
_MIN_INCLUSION = 0.01
"""A model's part that is less probable than this is left out."""
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
    """Nobody waits for it any more: it took too long."""

    def same(self, about: tuple[object, ...]) -> bool:
        """Whether it is the question of the same decision."""
        return all(a is b for a, b in zip(self.about, about, strict=True))

    @property
    def age_s(self) -> float:
        """Seconds since it was asked."""
        return time.perf_counter() - self.started

    def done(self, wait_s: float) -> bool:
        """Whether it has been answered, or has failed, after waiting for at most so many seconds."""
        begin = time.perf_counter()
        done = bool(wait((self.answer,), timeout=max(0.0, wait_s)).done)
        self.waited_s += time.perf_counter() - begin
        return done


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
        """`patient`: take the model for loaded and wait for every answer, up to its limit: for replays and
        evaluations, whose seconds are not real."""
        self.plain, self.model, self.workers, self.patient, self.gate = plain, model, workers, patient, gate
        skilled = model.calibration.skilled
        self.version = f"{plain.version}+{model.version}" if skilled else plain.version
        self._mutex = threading.Lock()
        self._question_lock = threading.Lock()
        self._questions: deque[_PendingQuestion] = deque(maxlen=_MAX_QUESTIONS)
        self._answers_s: deque[float] = deque(maxlen=_MAX_QUESTIONS)
        """Seconds of the answers of this process."""
        self._failures = 0
        """In a row."""
        self._warned: set[str] = set()

    def forecast(self, query: Query) -> Forecasts:
        """Forecast all candidates of the query; never raises for what the model does."""
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
        model, learned = self.model, before.mean
        alone = single.answer(query, before)

        def note(row: int) -> Mapping[str, object]:
            stated = annotation_of(model, view, row)
            return {**stated, "learned_log2_ms": round(float(learned[row]), 4)} if stated else stated

        def without(trouble: str) -> Forecasts:
            part = replace(consultation(model, view, 0.0), trouble=trouble, why=why)
            # Noted all the same: a calibration that only saw where the model was right would flatter it.
            return replace(with_consultation(alone, part), note=note)

        weight = model.calibration.weight
        if not view.usable:
            return without("; ".join(view.doubts))
        gap = disagreement(learned, view.log2_ms, view.trust, single.hyper)
        names = CandidateList.of(query.candidates)
        by_name = {names[int(i)]: float(gap[i]) for i in np.flatnonzero(gap)}
        blend = BlendedSurrogate(single, before.informed, by_name, weight)
        share = inclusion_probability(query, blend, blend.without_llm())
        if share < _MIN_INCLUSION:
            return without("its forecasts were refuted by measurements")
        part = replace(consultation(model, view, share * weight.mean), why=why)
        followed = blend.answer(query, blend.prior(query))
        mixed = with_consultation(mix_forecasts(followed, alone, share), part)
        # Drawn as the mixture is: else its luck would pass for the model's doing.
        without_llm = replace(alone, sampler=mix_forecasts(alone, alone, share).sampler)
        return replace(mixed, note=note, without_llm=without_llm)

    def _unasked(self, why: str) -> LLMConsultation:
        return LLMConsultation(self.model.backend.name, FORECAST_VERSION, asked=False, why=why)

    def _llm_forecasts(self, query: Query, before: Prior) -> tuple[LLMForecasts, str] | LLMConsultation:
        """The model's answer and why it was asked; or why there is none, or none yet."""
        about = (query.problem, query.candidates, query.relatives, query.ttir)
        with self._mutex:
            question = next((q for q in self._questions if q.same(about)), None)
            if question is None:
                if not all(q.answer.done() for q in self._questions):
                    # Questions of decisions that are over would pile up behind a model that loads, or hangs.
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
        left = limit - question.age_s
        last = self.patient or query.once
        # Nobody waits before the first candidates are measured, and never longer than the answer is worth.
        measured = len(query.measured) > question.known
        patience = left if last else min(left, worth.worth_s - question.waited_s) if measured else 0.0
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
        if trouble not in self._warned:
            self._warned.add(trouble)
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
        known = len(latest_labels(query.measured))
        seen = [m.compile_s for r in query.relatives for m in r.measurements if m.compile_s is not None]
        return GateInputs(
            candidates=max(0, len(query.candidates) - known),
            workers=self.workers,
            compile_s=float(fast_median(np.array(seen), axis=0)) if seen else _UNSEEN_COMPILE_S,
            saved=calibration.saved,
            answer_s=self._answer_s(),
            once=query.once,
            timeout_s=self.model.timeout_s,
        )

    def _answer_s(self) -> float:
        """Median seconds of the answers of this process, else of those that were calibrated on."""
        if self._answers_s and not self.patient:
            return float(fast_median(np.array(self._answers_s), axis=0))
        return self.model.calibration.pace.answer_s

    def _why_without_skill(self) -> str:
        calibration, name = self.model.calibration, self.model.backend.name
        if calibration.fitted:
            return "its calibration found no skill in it"
        text = "it is not calibrated: `forecast-autotune train calibrate-llm` says what it is worth"
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(
                f"language model {name}: {text}; until then it is not asked "
                "(FORECAST_AUTOTUNE_LLM_TRUST=always asks it)",
                stacklevel=2,
            )
        return text


def forced_trust(calibration: LLMCalibration, stated: float | None = None) -> tuple[LLMCalibration, Gate]:
    """The calibration without any scope, and a gate that is always open: an answer is worth any second in the limit.

    `stated` is a weight that the user gives; without it, `DEFAULT_WEIGHT` stands where none was found.
    """
    why = f"{_TRUST_VARIABLE}=always"
    if stated is not None:
        weight, why = BlendWeight(stated, stated), "as its weight is stated"
    elif calibration.skilled:
        weight = calibration.weight
    else:
        weight = DEFAULT_WEIGHT
        missing = "its calibration found no skill in it" if calibration.fitted else "not calibrated"
        why += f"; {missing}: default weight {weight.mean:g}"

    def ask(situation: GateInputs) -> GateDecision:
        return GateDecision(True, situation.timeout_s, why)

    scope = CalibrationScope(mass=calibration.scope.mass)
    return replace(calibration, weight=weight, scope=scope), ask


class UnaskedModelSurrogate:
    """`plain`, and in all its forecasts why the language model that is named was not asked."""

    def __init__(self, plain: DefaultSurrogate, model: str, why: str) -> None:
        self.plain, self.name, self.version = plain, plain.name, plain.version
        self.part = LLMConsultation(model, asked=False, why=why)

    def forecast(self, query: Query) -> Forecasts:
        """The forecast of `plain`."""
        forecasts = self.plain.forecast(query)
        return forecasts if query.provisional else with_consultation(forecasts, self.part)


def with_consultation(forecasts: Forecasts, part: LLMConsultation) -> Forecasts:
    """The forecasts with a model's part in them, which their reason tells, too."""
    return replace(forecasts, reason=f"{forecasts.reason}; {part}", consultation=part)
