"""FORECAST_AUTOTUNE_LLM_TRUST: whether the gate and the calibration decide if a model is asked, or the user does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from forecast_autotune.llm.calibration import BlendWeight, CalibrationScope, LLMCalibration
from forecast_autotune.llm.gate import GateDecision, GateInputs
from forecast_autotune.records import LLMConsultation
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.protocol import Forecasts, Query

Gate = Callable[[GateInputs], GateDecision]

TRUST_VARIABLE = "FORECAST_AUTOTUNE_LLM_TRUST"
DEFAULT_WEIGHT = BlendWeight(0.5, 0.5)
"""How far a model that must be heard is followed where no calibration says."""


def forced_trust(calibration: LLMCalibration, stated: float | None = None) -> tuple[LLMCalibration, Gate]:
    """The calibration without any scope, and a gate that is always open: an answer is worth any second in the limit.

    `stated` is a weight that the user gives; without it, `DEFAULT_WEIGHT` stands where none was found.
    """
    weight = DEFAULT_WEIGHT if stated is None else BlendWeight(stated, stated)
    found = {} if stated is not None else calibration.weights
    weights = {"pooled": weight, **{kind: w if w.mean > 0 else weight for kind, w in found.items()}}
    why = f"{TRUST_VARIABLE}=always" if stated is None else "as its weight is stated"
    if stated is None and not calibration.skilled:
        held = "not calibrated" if not calibration.weights else "its calibration found no skill in it"
        why += f"; {held}: default weight {weight.mean:g}"

    def ask(situation: GateInputs) -> GateDecision:
        return GateDecision(True, situation.timeout_s, situation.load_s + situation.latency_s, why)

    scope = CalibrationScope(mass=calibration.scope.mass)
    return replace(calibration, weights=weights, questions={}, known=(), decay=(), scope=scope), ask


class UnaskedModelSurrogate:
    """`plain`, and in all its forecasts why the language model that is named was not asked."""

    def __init__(self, plain: DefaultSurrogate, model: str, why: str) -> None:
        self.plain, self.name, self.version = plain, plain.name, plain.version
        self.part = LLMConsultation(model, asked=False, why=why)

    def forecast(self, query: Query) -> Forecasts:
        """What `plain` says."""
        found = self.plain.forecast(query)
        return found if query.provisional else with_consultation(found, self.part)


def with_consultation(forecasts: Forecasts, part: LLMConsultation) -> Forecasts:
    """The forecasts with a model's part in them, which their reason tells, too."""
    return replace(forecasts, reason=f"{forecasts.reason}; {part}", consultation=part)
