"""One problem before a fitted surrogate: its forecast, an adaptive run, and the default policy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from forecast_autotune.policy import RiskBounded, TuningState
from forecast_autotune.records import Candidate, Measurement, Plan
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.prior import formula_prior
from forecast_autotune.surrogates.protocol import Forecasts, Query, Relative, Surrogate
from forecast_autotune.tuning.loop import validate_forecasts
from forecast_autotune.tuning.replays.replay import replay_one
from forecast_train.evaluation import metrics
from forecast_train.evaluation.bin_scores import BinScores, bin_labels, bins_from_forecasts, score_bins
from forecast_train.evaluation.metrics import FloatArray
from forecast_train.evaluation.rows import (
    ADAPTIVE_BUDGETS,
    BUDGETS,
    INTERVAL_LEVELS,
    NEAR_REGRETS,
    WITHIN_SHARE,
    EvaluationRow,
    ForecastScores,
)
from forecast_train.evaluation.splits import Fold, family_of, hand_of, kernel_of

_DRAWS = 512
_MOST_JOINT_CANDIDATES = 512
"""Candidates whose joint distribution is scored; of more, an even choice of so many."""
_FAILED_REGRET = 9.0
"""Regret of choosing a candidate that cannot run, as `replay` charges it."""


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


@dataclass(frozen=True)
class TableArrays:
    """A table as arrays; computed once per problem and shared by all methods."""

    table: Table

    @cached_property
    def rows(self) -> dict[Candidate, Measurement]:
        """The measurement that counts per candidate."""
        return self.table.by_candidate()

    @cached_property
    def log2_ms(self) -> FloatArray:
        """Shape [n]; NaN for failures."""
        return np.array(self.table.log2_ms())

    @cached_property
    def grids(self) -> dict[Candidate, tuple[int, ...]]:
        """Launch grids, where they are known."""
        return self.table.grids()

    @cached_property
    def reference(self) -> int:
        """Row that bins are relative to, the same for all methods: of those that ran, the formula's best."""
        problem = self.table.problem
        before = formula_prior(problem, list(self.rows), self.grids, problem.ttir)
        return int(np.argmin(np.where(np.isfinite(self.log2_ms), before.mean, np.inf)))

    @cached_property
    def budgets(self) -> list[int]:
        """Measurements allowed by each of `BUDGETS`."""
        n = len(self.rows)
        return [min(n, max(least, math.ceil(share * n))) for least, share in BUDGETS]


def judge_problem(
    case: TableArrays, fold: Fold, method: str, surrogate: Surrogate, seed: int, settings: Settings
) -> EvaluationRow:
    """Everything that is reported of one problem.

    `settings` give the tolerance and the risk of the default policy. The surrogate sees nothing of the
    problem's table but what the policy measures. What it raises is raised: the tuner would go on without
    forecasts, and the score would be that of measuring everything.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(surrogate .* failed|joint samples failed|language model)")
        return _judge_seeded(case, fold, method, surrogate, seed, settings)


def _judge_seeded(
    case: TableArrays, fold: Fold, method: str, surrogate: Surrogate, seed: int, settings: Settings
) -> EvaluationRow:
    problem, n = case.table.problem, len(case.rows)
    truth, ran = case.log2_ms, np.isfinite(case.log2_ms)
    relatives = fold.relatives(case.table)
    query = Query(problem, list(case.rows), case.grids, (), relatives, problem.ttir)
    forecasts = validate_forecasts(surrogate.forecast(query), query.candidates)
    order = forecasts.order()
    path = metrics.regret_path(order, truth)
    at = {"top1": 1, "top3": 3, "top5": 5, "top10pct": math.ceil(0.1 * n)}
    at |= dict(zip(ADAPTIVE_BUDGETS, case.budgets, strict=True))
    order_only = getattr(surrogate, "order_only", False)
    stated = ForecastScores() if order_only else _forecast_scores(forecasts, truth, seed)
    walked = _adaptive_path(case, relatives, surrogate, seed, settings)
    decision, _ = replay_one(
        case.table,
        surrogate=surrogate,
        policy=None,
        settings=settings.with_(seed=seed),
        relatives=relatives,
    )
    return EvaluationRow(
        problem=problem.id,
        label=str(problem.extra.get("label") or f"{problem.kernel.name}/{problem.id}"),
        kernel=kernel_of(problem),
        family=family_of(problem),
        hand=hand_of(problem),
        device=problem.device.slug,
        fold=fold.name,
        method=method,
        surrogate=f"{surrogate.name}/{surrogate.version}",
        seed=seed,
        candidates=n,
        failures=int((~ran).sum()),
        top={name: metrics.regret_at(path, k) for name, k in at.items()},
        static_path=path[: case.budgets[-1]].tolist(),
        static_needed=[metrics.measurements_needed(path, share) for share in NEAR_REGRETS],
        spearman=metrics.spearman(forecasts.mean[ran], truth[ran]),
        auroc_fail=_none_if_nan(metrics.auroc(forecasts.p_fail, ~ran)),
        stated=stated,
        first_regret=float(path[0]) if ran[order[0]] else _FAILED_REGRET,
        adaptive_path=walked.tolist(),
        adaptive_needed=[metrics.measurements_needed(walked, share) for share in NEAR_REGRETS],
        default_regret=decision.regret,
        default_measured=decision.measured,
        default_risk=decision.stated_risk,
        tolerance=settings.tolerance,
        binned=None if order_only else _bin_scores(forecasts, truth, case.reference, seed),
    )


def _bin_scores(forecasts: Forecasts, truth: FloatArray, reference: int, seed: int) -> BinScores:
    rows = np.delete(np.arange(len(truth)), reference)
    if len(rows) > _MOST_JOINT_CANDIDATES:
        rows = np.sort(np.random.default_rng(seed).choice(rows, _MOST_JOINT_CANDIDATES, replace=False))
    p = bins_from_forecasts(forecasts, rows, reference, seed)
    return score_bins(p, bin_labels(truth[rows] - truth[reference]))


def _adaptive_path(
    case: TableArrays, relatives: Sequence[Relative], surrogate: Surrogate, seed: int, settings: Settings
) -> FloatArray:
    """Regret after each measurement, up to the largest budget; smaller budgets are its beginnings."""
    most, policy = case.budgets[-1], SpendBudgetPolicy()
    replay_one(
        case.table,
        surrogate=surrogate,
        policy=policy,
        settings=settings.with_(seed=seed, max_measurements=most),
        relatives=relatives,
        workers=1,
    )
    number = {c: i for i, c in enumerate(case.rows)}
    order = np.array([number[c] for c in policy.order], dtype=np.intp)
    # Past the budget the tuner goes on until something runs, as a launch needs a config that works.
    return metrics.regret_path(order, case.log2_ms)[:most]


def _forecast_scores(forecasts: Forecasts, truth: FloatArray, seed: int) -> ForecastScores:
    """The scores of the first forecast as a distribution. `truth` [n] is log2 ms, NaN for failures."""
    ran = np.isfinite(truth)
    joint = np.flatnonzero(ran)
    if len(joint) > _MOST_JOINT_CANDIDATES:
        joint = np.sort(np.random.default_rng(seed).choice(joint, _MOST_JOINT_CANDIDATES, replace=False))
    drawn = forecasts.samples(joint, _DRAWS, seed)
    drawn, centred = drawn - drawn.mean(axis=1, keepdims=True), truth[joint] - truth[joint].mean()
    mean, sd, seen = forecasts.mean[ran], forecasts.sd[ran], truth[ran]
    p_within = forecasts.p_within(WITHIN_SHARE, _DRAWS, seed)
    within = ran & (np.where(ran, truth, np.inf) <= np.nanmin(truth) + math.log2(1 + WITHIN_SHARE))
    return ForecastScores(
        crps_centred=float(metrics.crps_samples(drawn, centred).mean()),
        crps_raw=float(metrics.crps_gaussian(mean, sd, seen).mean()),
        coverage_centred=[metrics.sample_coverage(drawn, centred, level) for level in INTERVAL_LEVELS],
        coverage_stated=[_interval_coverage(forecasts, truth, level) for level in INTERVAL_LEVELS],
        p_within=p_within.tolist(),
        within=within.astype(int).tolist(),
        auroc_within=_none_if_nan(metrics.auroc(p_within, within)),
        confidence=float(p_within[forecasts.order()[0]]),
    )


def _interval_coverage(forecasts: Forecasts, truth: FloatArray, level: float) -> float:
    low, high = forecasts.interval(level)
    return float(((low <= truth) & (truth <= high))[np.isfinite(truth)].mean())


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value
