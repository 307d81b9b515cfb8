"""One row: one problem, judged with one method and one seed. Plain numbers, JSON both ways."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forecast_autotune.records.codec import Record
from forecast_train.evaluation.bin_scores import BinScores

INTERVAL_LEVELS = (0.5, 0.8, 0.9, 0.95)
"""Nominal levels of the central intervals whose coverage is reported."""
NEAR_REGRETS = (0.05, 0.02, 0.01)
"""Regrets for which the number of measurements is counted."""
WITHIN_SHARE = 0.05
"""A candidate is near the best when it is slower by at most this share."""
BUDGETS = ((3, 0.10), (5, 0.15), (8, 0.25))
"""Measurements allowed: at least so many, or this share of the candidates."""
STATIC_BUDGETS = (
    "top1",
    "top3",
    "top5",
    "top10pct",
    *(f"max{least}_{share:.0%}" for least, share in BUDGETS),
)
"""How far down the first forecast's order the best is looked for."""
ADAPTIVE_BUDGETS = tuple(f"max{least}_{share:.0%}" for least, share in BUDGETS)
"""Names of `BUDGETS`."""


@dataclass(frozen=True)
class ForecastScores:
    """Scores of the first forecast as a distribution; empty for a method that states an order only."""

    crps_centred: float | None = None
    """Of log2 time, both minus their means over the candidates that ran."""
    crps_raw: float | None = None
    coverage_centred: list[float] | None = None
    """By `INTERVAL_LEVELS`: of the joint samples, both minus their means as above. No calibration touches them."""
    coverage_stated: list[float] | None = None
    """By level: of the calibrated intervals of log2 time itself, which are what is stated of a candidate."""
    p_within: list[float] = field(default_factory=list)
    """P(within 5 % of the best), before any measurement, per candidate."""
    within: list[int] = field(default_factory=list)
    """1 where that was so."""
    auroc_within: float | None = None
    confidence: float | None = None
    """P(within 5 % of the best) of the candidate forecast to be the fastest."""


@dataclass(frozen=True)
class EvaluationRow(
    Record, label="row of an evaluation", complete=True, remedy="delete the file, it is made again"
):
    """What one method made of one problem. Regrets are shares; None where a score is not defined."""

    problem: str
    label: str
    kernel: str
    family: str
    hand: str
    device: str
    fold: str
    method: str
    surrogate: str
    """Name/version of what was fitted."""
    seed: int
    candidates: int
    failures: int
    top: dict[str, float]
    """Regret of the best among the first forecast's best, by `STATIC_BUDGETS`."""
    static_path: list[float]
    """Regret after each candidate of the first forecast's order, as far as the largest budget."""
    static_needed: list[int | None]
    """Candidates of that order until the regret is at most `NEAR_REGRETS`."""
    spearman: float
    auroc_fail: float | None
    stated: ForecastScores
    first_regret: float
    """Regret of the candidate forecast to be the fastest; 9.0 when it fails, as in replays."""
    adaptive_path: list[float]
    """Regret of the incumbent after each measurement, with an update after each."""
    adaptive_needed: list[int | None]
    """Measurements until the regret is at most `NEAR_REGRETS`; None: more than the largest budget."""
    default_regret: float
    default_measured: int
    default_risk: float
    """Stated risk of the default policy's decision."""
    tolerance: float
    binned: BinScores | None
    """Scores of the first forecast over bins, against a reference that ran; None as `stated` is empty."""

    def to_json(self) -> dict[str, Any]:
        """Plain numbers by name, probabilities and regrets to five digits."""
        return {name: _rounded(value) for name, value in super().to_json().items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value
