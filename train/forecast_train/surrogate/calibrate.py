"""Fit the curves of `forecast_autotune.surrogates.calibration`, for any surrogate.

Risk and P(within) get logistic curves in the log odds of what was stated (Platt 1999): with few kernels,
isotonic ones follow single kernels, and left-out kernels pay for it. Intervals get split-conformal factors. The
reliability that is reported leaves each family out of the curves as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import NormalDist
from typing import Any

import numpy as np

from forecast_autotune.numerics import INTERVAL_LEVELS
from forecast_autotune.policy import RiskBounded
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.calibration import (
    ALL_GROUPS,
    GROUPS,
    OWN_MEASUREMENT_BOUNDS,
    UNKNOWN,
    CalibrationCurve,
    CalibrationGroup,
    SurrogateCalibration,
    interval_class,
    measurement_class,
)
from forecast_autotune.surrogates.pooled import PooledSurrogate
from forecast_autotune.surrogates.protocol import Array
from forecast_train import metrics
from forecast_train.surrogate.replays import (
    FitSurrogate,
    ReplayRecord,
    ReplayStep,
    collect_device_replays,
    collect_replays,
)

KNOTS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)
_PROBABILITY_CLIP = 0.002
"""A share of 512 draws is never nearer to certainty than this."""


def calibrate_surrogate(
    tables: Sequence[Table],
    make: FitSurrogate,
    seeds: Sequence[int] = (0, 1, 2),
    *,
    jobs: int = 1,
    unseen: bool = False,
) -> dict[str, Any]:
    """`{"surrogate", "problems", "families", "calibration", "reliability"}`, JSON-able.

    `calibration` is what `SurrogateCalibration.from_json` reads; `reliability` is `reliability_report`'s. `unseen` as
    in `collect_replays`. Raises `SplitError` when there is but one family.
    """
    surrogate, records = collect_replays(tables, make, seeds, jobs=jobs, unseen=unseen)
    return _calibration_report(surrogate, records, seeds)


def calibrate_cross_device(
    tables: Sequence[Table], seeds: Sequence[int] = (0, 1), *, jobs: int = 1
) -> dict[str, Any]:
    """Calibrate `PooledSurrogate` like `calibrate_surrogate`: each device's table is forecast from the rest."""
    records = collect_device_replays(tables, seeds, jobs=jobs)
    return _calibration_report(f"{PooledSurrogate.name}/{PooledSurrogate.version}", records, seeds)


def _calibration_report(
    surrogate: str, records: Sequence[ReplayRecord], seeds: Sequence[int]
) -> dict[str, Any]:
    return {
        "surrogate": surrogate,
        "problems": len({r.problem for r in records}),
        "families": len({r.family for r in records}),
        "seeds": len(seeds),
        "calibration": fit_curves(records).to_json(),
        "reliability": reliability_report(records),
    }


def fit_curves(rows: Sequence[ReplayRecord]) -> SurrogateCalibration:
    """All groups that were recorded, and all of them together.

    Renamed devices are no recorded group: their clocks and caches are still those of a known one, so
    they check the pessimistic fallback and are not learnt from.
    """
    known_devices = [s for s in rows if s.group != UNKNOWN]
    groups = {name: [s for s in known_devices if s.group == name] for name in GROUPS}
    curves = {name: _fit_group(members) for name, members in groups.items() if members}
    return SurrogateCalibration({**curves, ALL_GROUPS: _fit_group(known_devices)} if curves else {})


def _risk_curves(rows: Sequence[ReplayRecord]) -> tuple[CalibrationCurve, ...]:
    """The correction of the stated risk that these replays call for, per class of `OWN_MEASUREMENT_BOUNDS`."""
    classes = (measurement_class(step.each) for s in rows for step in s.steps if step.beaten is not None)
    return tuple(_risk_curve(rows, own) for own in _nearest_observed(classes))


def _risk_curve(rows: Sequence[ReplayRecord], own: int) -> CalibrationCurve:
    risk, outcome, weight = _risk_pairs(rows, own)
    families = len({s.family for s in rows})
    # Nothing ever went wrong in n families is no proof that it never does (Jeffreys' estimate).
    return platt_curve(risk, outcome, weight, least=0.5 / (families + 1))


def _fit_group(rows: Sequence[ReplayRecord]) -> CalibrationGroup:
    steps = [step for s in rows for step in s.steps if len(step.z)]
    near = tuple(
        platt_curve(*_within_pairs(rows, own))
        for own in _nearest_observed(measurement_class(step.each) for step in steps)
    )
    wide = _nearest_observed(interval_class(step.own, step.each) for step in steps)
    intervals = tuple(_width_factors(*z_scores(rows, own)) for own in wide)
    return CalibrationGroup(_risk_curves(rows), near, intervals, len({s.problem for s in rows}))


def _nearest_observed(classes: Iterable[int]) -> list[int]:
    """Per class of `OWN_MEASUREMENT_BOUNDS` the class to learn from: itself, else the nearest observed one."""
    observed_classes = sorted(set(classes))
    return [
        min(observed_classes, key=lambda c: (abs(c - own), c)) for own in range(len(OWN_MEASUREMENT_BOUNDS))
    ]


def _risk_pairs(rows: Sequence[ReplayRecord], own: int) -> tuple[Array, Array, Array]:
    """(stated, came true, weight) of a class's steps with an incumbent; every replay weighs the same."""
    every = [[t for t in s.steps if t.beaten is not None and measurement_class(t.each) == own] for s in rows]
    complete = [steps for steps in every if steps]
    return (
        np.array([step.risk for steps in complete for step in steps]),
        np.array([float(bool(step.beaten)) for steps in complete for step in steps]),
        np.array([1.0 / len(steps) for steps in complete for _ in steps]),
    )


def _within_pairs(rows: Sequence[ReplayRecord], own: int) -> tuple[Array, Array, Array]:
    """(stated, came true, weight) per untried candidate at the steps of one class of `OWN_MEASUREMENT_BOUNDS`.

    Every step weighs the same.
    """
    steps = [
        step for s in rows for step in s.steps if measurement_class(step.each) == own and len(step.p_within)
    ]
    return (
        np.concatenate([np.zeros(0), *(step.p_within for step in steps)]),
        np.concatenate([np.zeros(0), *(step.within for step in steps)]),
        np.concatenate([np.zeros(0), *(np.full(len(s.within), 1.0 / len(s.within)) for s in steps)]),
    )


def z_scores(rows: Sequence[ReplayRecord], own: int) -> tuple[Array, Array]:
    """(|z|, weight) per untried candidate that runs, at the steps of one class of intervals."""
    every = [step for s in rows for step in s.steps if len(step.z)]
    steps = [step for step in every if interval_class(step.own, step.each) == own]
    return (
        np.abs(np.concatenate([np.zeros(0), *(step.z for step in steps)])),
        np.concatenate([np.zeros(0), *(np.full(len(s.z), 1.0 / len(s.z)) for s in steps)]),
    )


def _width_factors(score: Array, weight: Array) -> tuple[float, ...]:
    """Weighted quantiles of |z| over those of a normal, per level of `INTERVAL_LEVELS`; widths never fall."""
    order = np.argsort(score)
    share = np.cumsum(weight[order]) / weight.sum()
    place = np.minimum(np.searchsorted(share, INTERVAL_LEVELS), len(score) - 1)
    widths = np.maximum.accumulate(score[order][place])
    normal = [NormalDist().inv_cdf(0.5 + level / 2) for level in INTERVAL_LEVELS]
    return tuple(round(float(w / z), 4) for w, z in zip(np.maximum(widths, 0.01), normal, strict=True))


def platt_curve(stated: Array, came_true: Array, weight: Array, *, least: float = 0.0) -> CalibrationCurve:
    """A logistic curve in the log odds of `stated`, as knots; never below `least`.

    Newton's method with weak normal priors, slope 1 and intercept 0 (variance 4 each, in units of one
    replay), so that few or one-sided data stay near what was stated. The slope is kept positive.
    """
    x = _log_odds(stated)
    design = np.stack([np.ones_like(x), x], axis=1)
    prior, theta = np.array([0.0, 1.0]), np.array([0.0, 1.0])
    for _ in range(50):
        p = 1.0 / (1.0 + np.exp(-np.clip(design @ theta, -30, 30)))
        gradient = design.T @ (weight * (p - came_true)) + (theta - prior) / 4.0
        curvature = (design.T * (weight * p * (1.0 - p))) @ design + np.eye(2) / 4.0
        step = np.linalg.solve(curvature, gradient)
        theta = theta - np.clip(step, -1.0, 1.0)
        theta[1] = max(theta[1], 0.02)
        if np.abs(step).max() < 1e-8:
            break
    values = 1.0 / (1.0 + np.exp(-(theta[0] + theta[1] * _log_odds(np.array(KNOTS)))))
    return CalibrationCurve(KNOTS, tuple(round(float(max(p, least)), 4) for p in values))


def _log_odds(p: Array) -> Array:
    inside = _PROBABILITY_CLIP + (1.0 - 2.0 * _PROBABILITY_CLIP) * p
    return np.asarray(np.log(inside) - np.log1p(-inside))


def reliability_report(rows: Sequence[ReplayRecord], *, accepted: float = 0.1) -> dict[str, Any]:
    """Stated against observed by group, each family judged by curves that were fitted without it.

    `steps`: the risk at every step; `decisions`: only where the default policy would have stopped, at an
    accepted risk of `accepted`; `within`: P(within 5 %) of every untried candidate, at first and later;
    `coverage`: share inside the central intervals, by nominal level.
    """
    curves = {name: fit_curves([s for s in rows if s.family != name]) for name in {s.family for s in rows}}
    report: dict[str, Any] = {}
    for group in GROUPS:
        members = [s for s in rows if s.group == group]
        if members:
            report[group] = _reliability(members, [curves[s.family].group(group) for s in members], accepted)
    return report


def _reliability(
    rows: Sequence[ReplayRecord], groups: Sequence[CalibrationGroup], accepted: float
) -> dict[str, Any]:
    pairs = list(zip(rows, groups, strict=True))
    steps = [(stated(g, step), bool(step.beaten)) for s, g in pairs for step in _steps_with_truth(s)]
    stops = [
        (stated(g, step), bool(step.beaten)) for s, g in pairs for step in _stopping_step(s, g, accepted)
    ]
    report: dict[str, Any] = {
        "steps": table(*zip(*steps, strict=True)),
        "decisions": table(*zip(*stops, strict=True)),
    }
    for name, classes in (("first", (0,)), ("later", tuple(range(1, len(OWN_MEASUREMENT_BOUNDS))))):
        near_pairs = [
            (step, g) for s, g in pairs for step in s.steps if measurement_class(step.each) in classes
        ]
        near = np.concatenate([np.zeros(0), *(step.within for step, _ in near_pairs)])
        honest = [g.within[measurement_class(step.each)].array(step.p_within) for step, g in near_pairs]
        report[f"within_{name}"] = table(np.concatenate([np.zeros(0), *honest]), near)
        wide = [
            (step, g) for s, g in pairs for step in s.steps if interval_class(step.own, step.each) in classes
        ]
        report[f"coverage_{name}"] = _coverage(wide)
    return report


def _steps_with_truth(record: ReplayRecord) -> list[ReplayStep]:
    return [step for step in record.steps if step.beaten is not None]


def stated(group: CalibrationGroup, step: ReplayStep) -> float:
    """The calibrated risk of a step."""
    return group.risk[measurement_class(step.each)](step.risk)


def _stopping_step(record: ReplayRecord, group: CalibrationGroup, accepted: float) -> list[ReplayStep]:
    """The step at which the default policy would have stopped; empty if nothing ran."""
    policy, steps = RiskBounded(), _steps_with_truth(record)
    cap = max(policy.floor, policy.of(policy.share, record.candidates))
    for step in steps:
        if step.new >= cap or (step.own >= policy.least and stated(group, step) <= accepted):
            return [step]
    return steps[-1:]


def _coverage(steps: Sequence[tuple[ReplayStep, CalibrationGroup]]) -> dict[str, float]:
    """By nominal level, every replay's step with the same weight."""
    inside: dict[str, float] = {}
    for i, level in enumerate(INTERVAL_LEVELS):
        width = NormalDist().inv_cdf(0.5 + level / 2)
        shares = [
            float((np.abs(step.z) <= width * g.intervals[interval_class(step.own, step.each)][i]).mean())
            for step, g in steps
            if len(step.z)
        ]
        inside[str(level)] = float(np.mean(shares)) if shares else math.nan
    return inside


def table(stated: Sequence[float] | Array, true: Sequence[bool] | Array) -> dict[str, Any]:
    """Reliability in bins of equal width: n, ECE, Brier score, that of the base rate, and the bins."""
    p, truth = np.asarray(stated, float), np.asarray(true, bool)
    sums = metrics.bin_sums(p, truth)
    rate = float(truth.mean())
    return {
        "n": len(p),
        "ece": metrics.ece_of(sums),
        "brier": float(((p - truth) ** 2).mean()) if len(p) else math.nan,
        "brier_of_base_rate": rate * (1.0 - rate),
        "bins": [asdict(b) for b in metrics.reliability_of(sums)],
    }
