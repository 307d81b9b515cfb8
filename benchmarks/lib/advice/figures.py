"""Figures of the advice benchmark: means over kernels, paired intervals, and measurements at equal risk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from forecast_autotune.policy import RiskBounded

REGRETS = ("unmeasured", "after_3", "after_5", "regret")
OTHERS = ("measured", "missed", "stated_risk", "spearman", "rmse", "log_score")
DRAWS = 1000
ACCEPTED = 0.1
_GRID = (0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.1, 0.12, 0.14, 0.16, 0.18, 0.2, 0.25, 0.3)


def paired_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By arm: the mean over kernels of each figure, and its difference to `learned` on the same problems.

    Regrets are geometric means, as shares. Differences come with their 95 % interval over kernels.
    """
    learned = {r["problem"]: r for r in rows if r["arm"] == "learned"}
    found: dict[str, Any] = {}
    for arm in dict.fromkeys(r["arm"] for r in rows):
        mine = [r for r in rows if r["arm"] == arm and r["problem"] in learned]
        shown: dict[str, Any] = {"problems": len(mine), "kernels": len({r["kernel"] for r in mine})}
        for name in (*REGRETS, *OTHERS):
            if not mine or name not in mine[0]:
                continue
            log = name in REGRETS
            values = _by_kernel(mine, [_scaled(r[name], log) for r in mine])
            rivals = _by_kernel(mine, [_scaled(learned[r["problem"]][name], log) for r in mine])
            shown[name] = round(_unscaled(float(values.mean()), log), 5)
            if arm != "learned":
                shown[f"{name}_learned"] = round(_unscaled(float(rivals.mean()), log), 5)
                shown[f"{name}_difference"] = interval(values - rivals)
        found[arm] = shown
    return found


def interval(differences: npt.NDArray[np.float64], seed: int = 0) -> dict[str, float]:
    """Mean and its 95 % bootstrap interval, one entry per kernel."""
    generator = np.random.default_rng(seed)
    drawn = differences[generator.integers(len(differences), size=(DRAWS, len(differences)))].mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return {
        "value": round(float(differences.mean()), 5),
        "low": round(float(low), 5),
        "high": round(float(high), 5),
    }


def _by_kernel(rows: Sequence[Mapping[str, Any]], values: Sequence[float]) -> npt.NDArray[np.float64]:
    by: dict[str, list[float]] = {}
    for row, value in zip(rows, values, strict=True):
        by.setdefault(row["kernel"], []).append(value)
    return np.array([float(np.mean(by[k])) for k in sorted(by)])


def _scaled(value: float, log: bool) -> float:
    return math.log1p(value) if log else float(value)


def _unscaled(value: float, log: bool) -> float:
    return math.expm1(value) if log else value


def equal_risk(replays: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Measurements of each arm at the share of misses that `learned` has at an accepted risk of `ACCEPTED`.

    `replays`: {kernel, family, problem, arm, candidates, steps: [own, new, stated risk, missed]}. P(miss) is a
    logistic function of the log odds of the stated risk and of what was measured, fitted without the family.
    """
    curves = {arm: _curve([r for r in replays if r["arm"] == arm]) for arm in ("learned", "advice")}
    kernels = sorted({r["kernel"] for r in replays})
    weights = np.ones(len(kernels))
    measured, missed = _at(curves["learned"], kernels, weights)
    there = int(np.argmin(np.abs(np.array(_GRID) - ACCEPTED)))
    generator = np.random.default_rng(0)
    drawn = []
    for _ in range(DRAWS):
        lot = np.bincount(generator.integers(len(kernels), size=len(kernels)), minlength=len(kernels)).astype(
            float
        )
        drawn.append(_saving(curves, kernels, lot, there))
    low, high = np.nanquantile(drawn, (0.025, 0.975))
    other, other_missed = _at(curves["advice"], kernels, weights)
    return {
        "missed": round(float(missed[there]), 4),
        "measured_learned": round(float(measured[there]), 3),
        "measured_advice": round(float(_interpolated(missed[there], other_missed, other)), 3),
        "saving": {
            "value": round(_saving(curves, kernels, weights, there), 4),
            "low": round(float(low), 4),
            "high": round(float(high), 4),
        },
        "log_loss": {
            arm: round(float(np.mean([x for k in c.values() for x in k["loss"]])), 4)
            for arm, c in curves.items()
        },
    }


def _mean_loss(curve: Mapping[str, Any]) -> float:
    return round(float(np.mean([x for kernel in curve.values() for x in kernel["loss"]])), 4)


def _saving(
    curves: Mapping[str, Any], kernels: Sequence[str], weights: npt.NDArray[np.float64], there: int
) -> float:
    measured, missed = _at(curves["learned"], kernels, weights)
    other, other_missed = _at(curves["advice"], kernels, weights)
    return 1.0 - float(_interpolated(missed[there], other_missed, other)) / float(measured[there])


def _interpolated(x: float, xs: npt.NDArray[np.float64], ys: npt.NDArray[np.float64]) -> float:
    # Misses rise with the accepted risk, but for noise.
    rising = np.maximum.accumulate(xs)
    return float(np.interp(x, rising, ys))


def _at(
    curve: Mapping[str, Any], kernels: Sequence[str], weights: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    total = sum(w * len(curve[k]["measured"]) for k, w in zip(kernels, weights, strict=True))
    sums = [
        sum(w * np.sum(curve[k][name], axis=0) for k, w in zip(kernels, weights, strict=True))
        for name in ("measured", "missed")
    ]
    return sums[0] / total, sums[1] / total


def _curve(replays: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By kernel: what each of its replays had measured, and whether it missed, at each accepted risk."""
    from sklearn.linear_model import LogisticRegression

    policy = RiskBounded()
    rows = [(i, *step) for i, r in enumerate(replays) for step in r["steps"]]
    odds = [math.log(min(max(s[3], 1e-3), 0.999) / (1 - min(max(s[3], 1e-3), 0.999))) for s in rows]
    x = np.array(
        [
            [o, math.log(s[1] + 1), math.log(s[2] / replays[s[0]]["candidates"])]
            for o, s in zip(odds, rows, strict=True)
        ]
    )
    y = np.array([bool(s[4]) for s in rows])
    family = np.array([replays[s[0]]["family"] for s in rows])
    p = np.zeros(len(rows))
    for name in sorted(set(family)):
        left = family == name
        p[left] = LogisticRegression(max_iter=500).fit(x[~left], y[~left]).predict_proba(x[left])[:, 1]
    found: dict[str, Any] = {}
    start = 0
    for i, replay in enumerate(replays):
        count = len(replay["steps"])
        mine = list(zip(rows[start : start + count], p[start : start + count], strict=True))
        start += count
        kernel = found.setdefault(replay["kernel"], {"measured": [], "missed": [], "loss": []})
        kernel["loss"] += [-math.log(max(1e-4, q if row[4] else 1 - q)) for row, q in mine]
        cap = max(policy.floor, policy.of(policy.share, replay["candidates"]))
        stops = [
            next((r for r, q in mine if r[2] >= cap or (r[1] >= policy.least and q <= accepted)), mine[-1][0])
            for accepted in _GRID
        ]
        kernel["measured"].append([float(r[2]) for r in stops])
        kernel["missed"].append([float(r[4]) for r in stops])
        assert all(r[0] == i for r, _ in mine)
    return found
