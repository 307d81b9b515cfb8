"""Language models as methods of an evaluation: what was heard of one, alone and beside the learned surrogate.

Each fold's calibration is fitted to the answers on the fold's training problems alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from forecast_autotune.llm.calibration import LLMCalibration
from forecast_autotune.llm.prompt import FORECAST_VERSION
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.ensemble import EnsembleSurrogate
from forecast_autotune.surrogates.protocol import Forecasts, Query, Surrogate
from forecast_train.evaluation.baselines import FitSurrogate
from forecast_train.evaluation.joint_normal import UNKNOWN_SD, JointNormal, forecasts_from
from forecast_train.llm.calibration.answer_collection import ModelAnswers
from forecast_train.llm.calibration.calibrate import fit_calibration
from forecast_train.llm.calibration.saving_estimate import RecordedAnswersLLM, always_ask
from forecast_train.surrogate.fit import fit

LLM_ONLY, LEARNED_WITH_LLM = "llm", "learned+llm"
"""Names of the two methods."""
FEWEST_FAMILIES = 3
"""Families of kernels that a calibration takes at least."""


class LLMOnly:
    """A model's words about a problem, and its level learnt from what was measured; nothing else."""

    name = LLM_ONLY

    def __init__(self, model: RecordedAnswersLLM) -> None:
        self._model = model
        self.version = f"{FORECAST_VERSION}-{model.backend.name}"

    def forecast(self, query: Query) -> Forecasts:
        """The calibrated bins as normal forecasts; a vague one where the model said nothing."""
        view = self._model.consult(query, self._model.base.prior(query))
        told = view.trust > 0
        stretch = self._model.calibration.interval_factors(query.problem.device.slug)[2]
        sd = np.where(told, np.maximum(view.sd * stretch, 0.02), UNKNOWN_SD)
        belief = JointNormal(view.log2_ms, np.zeros((0, len(told))), sd, view.p_fail)
        return forecasts_from(
            query, belief, f"{int(told.sum())} candidates forecast by {self._model.backend.name}"
        )


def llm_methods(heard: Sequence[ModelAnswers]) -> dict[str, FitSurrogate]:
    """The two methods, by name; they can travel to other processes."""
    return {
        LLM_ONLY: partial(fit_llm_only, heard=list(heard)),
        LEARNED_WITH_LLM: partial(fit_learned_with_llm, heard=list(heard)),
    }


def fit_llm_only(tables: Sequence[Table], *, heard: Sequence[ModelAnswers]) -> Surrogate:
    """The model alone, calibrated on these tables."""
    return LLMOnly(RecordedAnswersLLM(heard, _calibration(tables, heard), AnalyticSurrogate()))


def fit_learned_with_llm(tables: Sequence[Table], *, heard: Sequence[ModelAnswers]) -> Surrogate:
    """The learned surrogate fitted to these tables, with the model beside it, whatever asking costs."""
    learned = fit(tables) if tables else AnalyticSurrogate()
    made = EnsembleSurrogate(
        DefaultSurrogate(learned),
        RecordedAnswersLLM(heard, _calibration(tables, heard), learned),
        patient=True,
        gate=always_ask,
    )
    # One name for all folds: their calibrations differ, the method does not.
    made.name, made.version = LEARNED_WITH_LLM, f"{learned.version}+{FORECAST_VERSION}-{heard[0].model}"
    return made


def _calibration(tables: Sequence[Table], heard: Sequence[ModelAnswers]) -> LLMCalibration:
    ids = {t.problem.id for t in tables}
    taught = [h for h in heard if h.problem in ids]
    if len({h.family for h in taught}) < FEWEST_FAMILIES:
        return LLMCalibration(heard[0].model, FORECAST_VERSION)
    return fit_calibration(taught)
