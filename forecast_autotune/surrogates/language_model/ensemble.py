"""The shipped surrogate and a language model together, where asking is worth its latency.

The model's disagreement with the learned forecast moves the prior mean that the Gaussian process of
`analytic` starts from, by a weight from the model's calibration, and is one more slope term of it: what is
measured corrects the weight, and where the two disagree the spread grows, so that the clock decides. What
comes of that is averaged with the learned forecast alone, by how much better it explains this problem's
measurements: the first round hedges between the two, and a model that is plainly wrong here is soon not
heard any more. The model is asked once per decision, without this problem's own measurements, as these are
counted by the process. It answers in a thread while the first candidates compile; without an answer in
time, the learned forecast stands alone.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.llm.gate import (
    DEFAULT_LOAD_S,
    DEFAULT_PER_TOKEN_S,
    GateDecision,
    GateInputs,
    decide_asking,
)
from forecast_autotune.llm.prompt import FORECAST_VERSION
from forecast_autotune.llm.question_kinds import question_kind
from forecast_autotune.numerics import fast_median
from forecast_autotune.records import LLMConsultation
from forecast_autotune.records.table import latest_labels
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.background import BackgroundTask
from forecast_autotune.surrogates.language_model.blend import (
    BlendedSurrogate,
    blend_failure,
    disagreement,
    inclusion_probability,
    mix_forecasts,
)
from forecast_autotune.surrogates.language_model.questions import MAX_CANDIDATES
from forecast_autotune.surrogates.language_model.surrogate import (
    LLMForecasts,
    LLMSurrogate,
    annotation_of,
    consultation,
)
from forecast_autotune.surrogates.language_model.trust import with_consultation
from forecast_autotune.surrogates.prior import Prior
from forecast_autotune.surrogates.protocol import Forecasts, Query

Rows = npt.NDArray[np.intp]

UNSEEN_COMPILE_S = 0.5
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
    ticket: BackgroundTask[LLMForecasts]
    worth: GateDecision
    known: int
    """Measurements of the problem when it was asked."""

    def same(self, about: tuple[object, ...]) -> bool:
        """Whether it is the question of the same decision."""
        return all(a is b for a, b in zip(self.about, about, strict=True))


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
        gate: Callable[[GateInputs], GateDecision] = decide_asking,
    ) -> None:
        """`patient`: take the model for loaded and wait for every answer, up to its limit: for replays and
        evaluations, whose seconds are not real."""
        self.plain, self.model, self.workers, self.patient, self.gate = plain, model, workers, patient, gate
        skilled = model.calibration.skilled
        self.version = f"{plain.version}+{model.version}" if skilled else plain.version
        self._mutex = threading.Lock()
        self._question_lock = threading.Lock()
        self._questions: deque[_PendingQuestion] = deque(maxlen=_MAX_QUESTIONS)
        pace = model.calibration.pace
        self._per_token_s, self._load_s = (
            pace.per_token_s or DEFAULT_PER_TOKEN_S,
            pace.load_s or DEFAULT_LOAD_S,
        )
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
        found = self._llm_forecasts(query, before)
        if isinstance(found, LLMConsultation):
            return with_consultation(single.answer(query, before), found)
        view, why = found
        return self._blend(query, before, view, single, why)

    def _blend(
        self, query: Query, before: Prior, view: LLMForecasts, single: AnalyticSurrogate, why: str
    ) -> Forecasts:
        model, learned = self.model, before.mean
        alone = single.answer(query, before)

        def note(row: int) -> Mapping[str, object]:
            said = annotation_of(model, view, row)
            return {**said, "learned_log2_ms": round(float(learned[row]), 4)} if said else said

        def without(trouble: str) -> Forecasts:
            part = replace(consultation(model, view, 0.0), trouble=trouble, why=why)
            # Noted all the same: a calibration that only saw where the model was right would flatter it.
            return replace(with_consultation(alone, part), note=note)

        question, known = _kind_of_question(query, before), len(latest_labels(query.measured))
        weight = model.calibration.weight(view.kind, view.distance, question, known)
        if not view.usable or weight.mean <= 0.0:
            return without("; ".join(view.doubts) or f"of no use: {question}, {view.kind}")
        moved = disagreement(learned, view.log2_ms, view.trust, single.hyper)
        names = CandidateList.of(query.candidates)
        by_name = {names[int(i)]: float(moved[i]) for i in np.flatnonzero(moved)}
        blend = BlendedSurrogate(single, before.informed, by_name, weight, model.calibration.remains)
        share = inclusion_probability(query, blend, blend.without_llm())
        if share < _MIN_INCLUSION:
            return without("its forecasts were refuted by measurements")
        prior = blend.prior(query)
        p_fail = blend_failure(prior.p_fail, view.p_fail, view.trust > 0, model.calibration.fail_weight)
        part = replace(consultation(model, view, share * weight.mean), why=why)
        followed = blend.answer(query, replace(prior, p_fail=p_fail))
        found = with_consultation(mix_forecasts(followed, alone, share), part)
        # Drawn as the mixture is: else its luck would pass for the model's doing.
        without_llm = replace(alone, sampler=mix_forecasts(alone, alone, share).sampler)
        return replace(found, note=note, without_llm=without_llm)

    def _unasked(self, why: str) -> LLMConsultation:
        return LLMConsultation(self.model.backend.name, FORECAST_VERSION, asked=False, why=why)

    def _llm_forecasts(self, query: Query, before: Prior) -> tuple[LLMForecasts, str] | LLMConsultation:
        """The model's answer and why it was asked; or why there is none, or none yet."""
        about = (query.problem, query.candidates, query.relatives, query.ttir)
        with self._mutex:
            asked = next((a for a in self._questions if a.same(about)), None)
            if first := asked is None:
                if any(not a.ticket.done() for a in self._questions):
                    # Questions of decisions that are over would pile up behind a model that loads, or hangs.
                    return self._unasked("it is still busy with an earlier question")
                if self._failures >= _MAX_FAILURES:
                    return self._unasked(f"it failed {self._failures} times in a row")
                worth = self.gate(self._situation(query, before))
                if not worth.ask:
                    return self._unasked(worth.reason)
                asked = _PendingQuestion(
                    about, self._start_question(query, before), worth, len(query.measured)
                )
                self._questions.append(asked)
        return self._await_answer(asked, query, first)

    def _await_answer(
        self, asked: _PendingQuestion, query: Query, first: bool
    ) -> tuple[LLMForecasts, str] | LLMConsultation:
        ticket, worth, limit = asked.ticket, asked.worth, self.model.timeout_s
        left = limit - ticket.age_s
        last = self.patient or query.once
        pays = worth.should_wait
        if not first:
            # By now candidates compile. Whoever waits must gain: not for what takes longer than it is worth.
            measured = len(query.measured) > asked.known
            pays = measured and worth.cost_s - ticket.age_s <= worth.worth_s
        wait = left if last else min(left, worth.worth_s) if pays else 0.0
        if not ticket.abandoned and ticket.done(wait):
            if ticket.answer is not None:
                return ticket.answer, worth.reason
            return self._failed(asked, f"it failed: {ticket.error}")
        if ticket.abandoned or last or ticket.age_s >= limit:
            ticket.abandoned = True
            return self._failed(asked, f"no answer within {limit:g} s")
        return self._unheard(asked, "asked, not answered yet")

    def _unheard(self, asked: _PendingQuestion, trouble: str) -> LLMConsultation:
        return LLMConsultation(
            self.model.backend.name,
            FORECAST_VERSION,
            seconds=asked.ticket.age_s,
            trouble=trouble,
            why=asked.worth.reason,
        )

    def _failed(self, asked: _PendingQuestion, trouble: str) -> LLMConsultation:
        name = self.model.backend.name
        if trouble not in self._warned:
            self._warned.add(trouble)
            warnings.warn(
                f"language model {name}: {trouble}; decisions go on without it. Raise "
                "FORECAST_AUTOTUNE_LLM_TIMEOUT where it is slow; FORECAST_AUTOTUNE_LLM= asks none",
                stacklevel=2,
            )
        return self._unheard(asked, trouble)

    def _start_question(self, query: Query, before: Prior) -> BackgroundTask[LLMForecasts]:
        model, backend = self.model, self.model.backend

        def work() -> LLMForecasts:
            with (
                self._question_lock
            ):  # one question at a time: two would share a device and time out together
                try:
                    begun = time.perf_counter()
                    if not backend.ready():
                        backend.prepare()
                        self._load_s = time.perf_counter() - begun
                    view = model.consult(query, before, own=False)
                except Exception:
                    self._failures += 1
                    raise
                self._failures = 0
                if view.usage.prompt_tokens and view.usage.seconds:
                    self._per_token_s = view.usage.seconds / view.usage.prompt_tokens
                if view.usage.seconds:
                    self._answers_s.append(view.usage.seconds)
                return view

        return BackgroundTask.start(work)

    def _situation(self, query: Query, before: Prior) -> GateInputs:
        calibration, pace = self.model.calibration, self.model.calibration.pace
        question = _kind_of_question(query, before)
        known = len(latest_labels(query.measured))
        seen = [m.compile_s for r in query.relatives for m in r.measurements if m.compile_s is not None]
        per_token = (pace.per_token_s or DEFAULT_PER_TOKEN_S) if self.patient else self._per_token_s
        return GateInputs(
            candidates=max(0, len(query.candidates) - known),
            workers=self.workers,
            compile_s=float(fast_median(np.array(seen), axis=0)) if seen else UNSEEN_COMPILE_S,
            saved=calibration.saving(question, known),
            asked=min(len(query.candidates), MAX_CANDIDATES),
            per_token_s=per_token,
            load_s=0.0 if self.patient or self._loaded() else self._load_s,
            once=query.once,
            timeout_s=self.model.timeout_s,
            answer_s=self._answer_s(),
            regret_saved=calibration.regret_saved(question),
        )

    def _answer_s(self) -> float | None:
        """Median seconds of the answers of this process, else of those that were calibrated on."""
        if self._answers_s and not self.patient:
            return float(fast_median(np.array(self._answers_s), axis=0))
        return self.model.calibration.pace.answer_s or None

    def _loaded(self) -> bool:
        try:
            return self.model.backend.ready()
        except Exception:
            return False  # it will fail again where it is asked, and be dealt with there

    def _why_without_skill(self) -> str:
        calibration, name = self.model.calibration, self.model.backend.name
        if calibration.weights:
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


def _kind_of_question(query: Query, before: Prior) -> str:
    return question_kind(query.problem.device, before.informed, CandidateList.of(query.candidates).sources)
