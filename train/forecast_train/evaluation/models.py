"""Language models as methods of an evaluation: what was heard of one, alone and beside the learned surrogate.

Each fold's calibration is fitted to the answers on the fold's training problems alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from forecast_autotune.llm.calibration import Calibration
from forecast_autotune.llm.prompt import FORECAST
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.default import Default
from forecast_autotune.surrogates.formula import Analytic
from forecast_autotune.surrogates.language_model.ensemble import Ensemble
from forecast_autotune.surrogates.protocol import Forecasts, Query, Surrogate
from forecast_train.evaluation.answers import VAGUE_SD, Belief, answer
from forecast_train.evaluation.baselines import Fit
from forecast_train.llm.calibrate import calibrate
from forecast_train.llm.hearing import Heard
from forecast_train.llm.saving import Recalled, always
from forecast_train.surrogate.fit import fit

ALONE, TOGETHER = "llm", "learned+llm"
"""Names of the two methods."""
FEWEST = 3
"""Families of kernels that a calibration takes at least."""


class Alone:
    """A model's words about a problem, and its level learnt from what was measured; nothing else."""

    name = ALONE

    def __init__(self, model: Recalled) -> None:
        self._model = model
        self.version = f"{FORECAST}-{model.backend.name}"

    def forecast(self, query: Query) -> Forecasts:
        """The calibrated bins as normal forecasts; a vague one where the model said nothing."""
        view = self._model.view(query, self._model.base.before(query))
        told = view.trust > 0
        stretch = self._model.calibration.factors(query.problem.device.slug)[2]
        sd = np.where(told, np.maximum(view.sd * stretch, 0.02), VAGUE_SD)
        belief = Belief(view.log2_ms, np.zeros((0, len(told))), sd, view.p_fail)
        return answer(query, belief, f"{int(told.sum())} candidates forecast by {self._model.backend.name}")


def methods_of(heard: Sequence[Heard]) -> dict[str, Fit]:
    """The two methods, by name; they can travel to other processes."""
    return {ALONE: partial(alone, heard=list(heard)), TOGETHER: partial(together, heard=list(heard))}


def alone(tables: Sequence[Table], *, heard: Sequence[Heard]) -> Surrogate:
    """The model alone, calibrated on these tables."""
    return Alone(Recalled(heard, _calibration(tables, heard), Analytic()))


def together(tables: Sequence[Table], *, heard: Sequence[Heard]) -> Surrogate:
    """The learned surrogate fitted to these tables, with the model beside it, whatever asking costs."""
    learned = fit(tables) if tables else Analytic()
    made = Ensemble(
        Default(learned), Recalled(heard, _calibration(tables, heard), learned), patient=True, gate=always
    )
    # One name for all folds: their calibrations differ, the method does not.
    made.name, made.version = TOGETHER, f"{learned.version}+{FORECAST}-{heard[0].model}"
    return made


def _calibration(tables: Sequence[Table], heard: Sequence[Heard]) -> Calibration:
    ids = {t.problem.id for t in tables}
    taught = [h for h in heard if h.problem in ids]
    if len({h.family for h in taught}) < FEWEST:
        return Calibration(heard[0].model, FORECAST)
    return calibrate(taught)
