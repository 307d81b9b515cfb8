"""What a language model changed in one decision: its plan, made with and without the model's answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from forecast_autotune.policy import Policy, TuningState
from forecast_autotune.records import Candidate, LLMConsultation, Plan
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.protocol import Forecasts


class LLMEffect:
    """Follows a model through the rounds of one decision; the first plan with its answer is compared."""

    def __init__(self) -> None:
        self._part: LLMConsultation | None = None
        self._round: int | None = None
        self._moved = (0, 0)

    def note(
        self, state: TuningState, plan: Plan, policy: Policy, correct: Callable[[Forecasts], Forecasts]
    ) -> None:
        """Take in a plan; `correct` is what the forecasts behind it went through."""
        self._part = state.forecasts.consultation or self._part
        alone = state.forecasts.without_llm
        if alone is None or len(alone) != len(state.forecasts) or self._round not in (None, state.round):
            return
        self._round = state.round
        try:
            other = policy.plan(replace(state, forecasts=correct(alone)))
        except Exception:
            return  # the plan that counts was made; what it is compared with must not cost it
        ours, theirs = _deferred(plan), _deferred(other)
        self._moved = (len(ours - theirs), len(theirs - ours))

    def record(self, last: LLMConsultation | None) -> LLMConsultation | None:
        """The model's part with what it moved; `last` as the last forecasts have it."""
        part = last or self._part
        return part and replace(part, moved_in=self._moved[0], moved_out=self._moved[1])


def stored_consultation(settings: Settings) -> LLMConsultation | None:
    """The part of the model that is named in a decision that was made before; None where none is named."""
    if not settings.llm:
        return None
    from forecast_autotune.llm.spec import (
        shown_model,
    )  # a known problem's first call loads nothing else of it

    return LLMConsultation(shown_model(settings.llm), asked=False, why="it was decided before")


def _deferred(plan: Plan) -> set[Candidate]:
    """What a plan measures on its merits."""
    return set(plan.measure) - set(plan.audit)
