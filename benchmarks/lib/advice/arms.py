"""The arms of the advice benchmark: the learned surrogate with and without what a language model said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.lib.advice.surrogates import FamilyModels, FollowingAdvice, advice_by_source
from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.llm.advice.record import Advice
from forecast_autotune.llm.calibration import BlendWeight
from forecast_autotune.surrogates.advised import AdviceWeights, AdvisedSurrogate
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.blend import BlendedSurrogate, disagreement
from forecast_autotune.surrogates.protocol import Forecasts, Query, Surrogate

ARMS = ("learned", "advice-1", "advice-2", "advice", "direct", "ensemble")
ALONE = ("advice-1", "advice-2")
"""Arms of one answer only."""
DIRECT_WEIGHT = BlendWeight(0.45, 0.3)
"""Of direct forecasts beside the learned ones; a published study found 0.5 (its kernels are not these)."""
ENSEMBLE_WEIGHT = BlendWeight(0.35, 0.3)
"""... and beside learned ones that follow advice."""


@dataclass(frozen=True)
class ArmContext:
    """What the arms of one family are made of."""

    models: Path
    family: str
    weights: AdviceWeights | None
    """None: those that ship."""
    direct: Mapping[str, Mapping[str, float]]
    """log2 slow-down by config, as JSON text, by problem."""


def open_arms(context: ArmContext) -> dict[str, Surrogate]:
    """Every arm by name."""
    base = FamilyModels(context.models, [context.family]).without(context.family)
    assert isinstance(base, AnalyticSurrogate)
    both = advice_by_source()
    made: dict[str, Surrogate] = {"learned": base}
    for name in ("advice-1", "advice-2"):
        made[name] = FollowingAdvice(base, advice_by_source(versions=[name]), context.weights)
    made["advice"] = FollowingAdvice(base, both, context.weights)
    made["direct"] = DirectArm(base, {}, context)
    made["ensemble"] = DirectArm(base, both, context)
    return made


class DirectArm:
    """Moves the belief, with or without advice, towards recorded direct forecasts."""

    def __init__(self, base: AnalyticSurrogate, advice: Mapping[str, Advice], context: ArmContext) -> None:
        self.base, self.advice, self.context = base, advice, context
        self.name, self.version = "direct", f"{base.version}-recorded"

    def forecast(self, query: Query) -> Forecasts:
        """Forecast all candidates of the query."""
        query = replace(query, candidates=CandidateList.of(query.candidates))
        advice = self.advice.get(query.problem.kernel.source_sha256)
        base, weight = self.base, DIRECT_WEIGHT
        if advice is not None:
            base, weight = AdvisedSurrogate(self.base, advice, True, self.context.weights), ENSEMBLE_WEIGHT
        told = self.context.direct[query.problem.id]
        names = [json.dumps(c.config.to_json(), sort_keys=True) for c in query.candidates]
        trust = np.array([float(name in told) for name in names])
        stated = np.array([told.get(name, 0.0) for name in names])
        moved = disagreement(self.base.prior(query).mean, stated, trust, self.base.hyper)
        by_name = {c: float(v) for c, v in zip(query.candidates, moved, strict=True)}
        blend = BlendedSurrogate(base, True, by_name, weight)
        return blend.answer(query, blend.prior(query))
