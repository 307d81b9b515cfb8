"""What choices of skeletons and of constants are worth, from the scores that a model gave them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.lib.advice.cost_orders import FACTORS
from benchmarks.lib.advice.figures import interval

Array = npt.NDArray[np.float64]
Row = Mapping[str, Any]
WITH, WITHOUT, DIFFERENCE, NAMES = "likelihood", "without the kernel", "difference", "shared names"
STATED = FACTORS.index(1.0)


def choose(scores: Sequence[float], seed: int | str = 0) -> int:
    """Number of the highest score; ties by lot, as the first one is the right one."""
    given = np.asarray(scores, float)
    best = np.flatnonzero(given == given.max())
    if len(best) == 1:
        return int(best[0])
    lot = np.random.default_rng([ord(c) for c in str(seed)])
    return int(lot.choice(best))


def share(hits: int, count: int) -> dict[str, float]:
    """A share with its exact binomial 95 % interval (Clopper and Pearson, 1934)."""
    from scipy.stats import binomtest

    found = binomtest(hits, count).proportion_ci(0.95, method="exact")
    return {"value": hits / count, "low": float(found.low), "high": float(found.high), "count": count}


def skeleton_scores(row: Row, form: str) -> dict[str, list[float]]:
    """Scores of a kernel's skeletons by each way to choose; `form` says in whose names they were shown."""
    told, alone = (row["answers"][name][form] for name in (WITH, WITHOUT))
    return {
        WITH: told,
        WITHOUT: alone,
        DIFFERENCE: [a - b for a, b in zip(told, alone, strict=True)],
        NAMES: row[NAMES][form],
    }


def skeleton_summary(rows: Sequence[Row], form: str) -> dict[str, Any]:
    """How often each way puts the own skeleton first, and what the chosen ones are worth."""
    spearman, regret = (
        np.array([[f[name] for f in row["figures"]] for row in rows]) for name in ("spearman", "log_regret")
    )
    at = np.arange(len(rows))
    found: dict[str, Any] = {
        "random choice": _worth(spearman.mean(axis=1), regret.mean(axis=1)),
        "own": _worth(spearman[:, 0], regret[:, 0]),
    }
    for way in (WITH, WITHOUT, DIFFERENCE, NAMES):
        chosen = np.array([choose(skeleton_scores(row, form)[way], row["kernel"]) for row in rows])
        mine = _worth(spearman[at, chosen], regret[at, chosen])
        found[way] = {
            "own_first": share(int(np.sum(chosen == 0)), len(rows)),
            **mine,
            "spearman_over_random": interval(spearman[at, chosen] - spearman.mean(axis=1)),
            "spearman_below_own": interval(spearman[:, 0] - spearman[at, chosen]),
        }
    return found


def constant_scores(row: Row) -> dict[str, list[list[float]]]:
    """Scores [constants, FACTORS] of a kernel's values by each way to choose."""
    told, alone = (row["answers"][name]["constants"] for name in (WITH, WITHOUT))
    return {
        WITH: told,
        WITHOUT: alone,
        DIFFERENCE: [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(told, alone, strict=True)],
    }


def constant_summary(rows: Sequence[Row]) -> dict[str, Any]:
    """How often each way chooses the stated value, and what the chosen constants are worth.

    Kernels whose constants do not change the order of their candidates are left out.
    """
    rows = [row for row in rows if row["constants"]]
    worth = [{tuple(way): (s, r) for way, s, r in row["ways"]} for row in rows]
    stated = np.array([w[(STATED,) * len(row["constants"])] for row, w in zip(rows, worth, strict=True)])
    lot = _over_kernels(worth, lambda w: np.mean(list(w.values()), axis=0))
    best = _over_kernels(worth, lambda w: np.array(max(w.values(), key=lambda v: (v[0], -v[1]))))
    found: dict[str, Any] = {
        "kernels": len(rows),
        "constants": sum(len(row["constants"]) for row in rows),
        "stated": _worth(*stated.T),
        "random choice": _worth(*lot.T),
        "best": _worth(*best.T),
    }
    for way in (WITH, WITHOUT, DIFFERENCE):
        picks = [
            tuple(
                choose(scores, f"{row['kernel']} {name}")
                for name, scores in zip(row["constants"], constant_scores(row)[way], strict=True)
            )
            for row in rows
        ]
        mine = np.array([w[pick] for w, pick in zip(worth, picks, strict=True)])
        flat = [i for pick in picks for i in pick]
        found[way] = {
            "stated_first": share(sum(i == STATED for i in flat), len(flat)),
            "chosen": [flat.count(i) for i in range(len(FACTORS))],
            **_worth(*mine.T),
            "spearman_over_random": interval(mine[:, 0] - lot[:, 0]),
            "spearman_below_stated": interval(stated[:, 0] - mine[:, 0]),
        }
    return found


def _over_kernels(worth: Sequence[Any], of: Callable[[Any], Array]) -> Array:
    return np.array([of(w) for w in worth])


def _worth(spearman: Array, log_regret: Array) -> dict[str, float]:
    """Means over kernels; regret is geometric, as a share."""
    return {
        "spearman": round(float(spearman.mean()), 4),
        "regret_after_5": round(math.expm1(float(log_regret.mean())), 4),
    }
