"""One problem before a fitted surrogate: its forecast, an adaptive run, and the default policy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forecast_autotune.numerics import INTERVAL_LEVELS
from forecast_autotune.policy import RiskBounded, TuningState
from forecast_autotune.records import Candidate, Plan
from forecast_autotune.records.codec import Record
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.protocol import Query, Relative, Surrogate
from forecast_autotune.tuning.loop import validate_forecasts
from forecast_autotune.tuning.replays.replay import replay_one
from forecast_train import metrics
from forecast_train.splits import Fold, kernel_of

BUDGETS = {f"max{least}_{share:.0%}": (least, share) for least, share in ((3, 0.10), (5, 0.15), (8, 0.25))}
"""Measurements allowed, by name: at least so many, or this share of the candidates."""
STATIC_BUDGETS = ("top1", "top3", *BUDGETS)
"""Depths of the first forecast's order in which the best is looked for."""


@dataclass(frozen=True)
class EvaluationRow(
    Record, label="row of an evaluation", complete=True, remedy="delete the file, it is made again"
):
    """The result of one method on one problem with one seed. Regrets are shares."""

    problem: str
    label: str
    kernel: str
    method: str
    surrogate: str
    """Name/version of what was fitted."""
    seed: int
    candidates: int
    static: dict[str, float]
    """Regret of the best among the first forecast's best, by `STATIC_BUDGETS`."""
    spearman: float
    coverage: list[float] | None
    """By `INTERVAL_LEVELS`: of the first forecast's calibrated intervals of log2 time; None for a method that states
    an order only."""
    adaptive: dict[str, float]
    """Regret of the incumbent after so many measurements, with an update after each, by `BUDGETS`."""
    default_regret: float
    default_measured: int
    default_risk: float
    """Stated risk of the default policy's decision."""
    tolerance: float

    def to_json(self) -> dict[str, Any]:
        """Plain numbers by name, probabilities and regrets to five digits."""
        return {name: _rounded(value) for name, value in super().to_json().items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value


class SpendBudgetPolicy:
    """One measurement at a time until the budget is used up, whatever the risk; notes their order."""

    name = "spend"

    def __init__(self) -> None:
        self._inner = RiskBounded(first=0.0, least=1)
        self.order: list[Candidate] = []
        """Candidates as they were measured. A store sorts by the time of measuring, which in a replay is
        the time at which the table was recorded."""

    def plan(self, state: TuningState) -> Plan:
        """The most promising candidate."""
        self.order = list(state.measured)
        # Even a stated risk of 0 is no reason to stop: budgets must be equal to be compared.
        return self._inner.plan(replace(state, risk=-1.0))


def judge_problem(
    table: Table, fold: Fold, method: str, surrogate: Surrogate, seed: int, settings: Settings
) -> EvaluationRow:
    """Everything that is reported of one problem.

    `settings` give the tolerance and the risk of the default policy. The surrogate sees nothing of the
    problem's table but what the policy measures. Its errors are raised: the tuner would go on without
    forecasts, and the score would be that of measuring everything.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(surrogate .* failed|joint samples failed|language model)")
        return _judge(table, fold, method, surrogate, seed, settings)


def _judge(
    table: Table, fold: Fold, method: str, surrogate: Surrogate, seed: int, settings: Settings
) -> EvaluationRow:
    problem, candidates, truth = table.problem, list(table.by_candidate()), np.array(table.log2_ms())
    n, ran = len(candidates), np.isfinite(truth)
    budgets = {name: min(n, max(least, math.ceil(share * n))) for name, (least, share) in BUDGETS.items()}
    relatives = fold.relatives(table)
    query = Query(problem, candidates, table.grids(), (), relatives, problem.ttir)
    forecasts = validate_forecasts(surrogate.forecast(query), query.candidates)
    static = metrics.regret_path(forecasts.order(), truth)
    coverage = None
    if not getattr(surrogate, "order_only", False):
        ends = [forecasts.interval(level) for level in INTERVAL_LEVELS]
        coverage = [float(((low <= truth) & (truth <= high))[ran].mean()) for low, high in ends]
    adaptive = _adaptive_path(table, relatives, surrogate, settings.with_(seed=seed), max(budgets.values()))
    decision, _ = replay_one(
        table, surrogate=surrogate, policy=None, settings=settings.with_(seed=seed), relatives=relatives
    )
    return EvaluationRow(
        problem=problem.id,
        label=str(problem.extra.get("label") or f"{problem.kernel.name}/{problem.id}"),
        kernel=kernel_of(problem),
        method=method,
        surrogate=f"{surrogate.name}/{surrogate.version}",
        seed=seed,
        candidates=n,
        static={name: metrics.regret_at(static, k) for name, k in {"top1": 1, "top3": 3, **budgets}.items()},
        spearman=metrics.spearman(forecasts.mean[ran], truth[ran]),
        coverage=coverage,
        adaptive={name: metrics.regret_at(adaptive, count) for name, count in budgets.items()},
        default_regret=decision.regret,
        default_measured=decision.measured,
        default_risk=decision.stated_risk,
        tolerance=settings.tolerance,
    )


def _adaptive_path(
    table: Table, relatives: Sequence[Relative], surrogate: Surrogate, settings: Settings, most: int
) -> metrics.FloatArray:
    """Regret after each of `most` measurements; smaller budgets are its beginnings."""
    policy = SpendBudgetPolicy()
    replay_one(
        table,
        surrogate=surrogate,
        policy=policy,
        settings=settings.with_(max_measurements=most),
        relatives=relatives,
        workers=1,
    )
    row = {c: i for i, c in enumerate(table.by_candidate())}
    order = np.array([row[c] for c in policy.order], dtype=np.intp)
    # Past the budget the tuner goes on until something runs, as a launch needs a config that works.
    return metrics.regret_path(order, np.array(table.log2_ms()))[:most]
