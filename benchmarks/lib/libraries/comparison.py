"""Figures of all arms' files together: wall seconds in common contexts, parts of the cost, and regret side by side.

Ratios are of sums of wall seconds over the contexts that both arms decided. Intervals are 95 %, by bootstrap over
kernels: contexts of one kernel hang together.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.lib.libraries.contexts import ContextId, read_rows
from forecast_train.metrics import cluster_bootstrap

ArmRows = Mapping[ContextId, Mapping[str, Any]]
"""Decisions of one arm by context."""

HARVEST, RETIME, FLOOR, OURS = "harvest", "retime", "floor", "forecast"
CLASSES = ((1, 8), (9, 16), (17, 32), (33, math.inf))
"""Shortest and longest list of a class."""
TOLERANCE = 0.02
COST_PARTS = ("forecast_s", "compile_s", "timing_s")
_PLACES = 5

Figures = dict[str, Any]
_Floats = npt.NDArray[np.float64]


def read_arms(folders: Sequence[Path]) -> dict[str, dict[ContextId, dict[str, Any]]]:
    """Decisions by arm (the name of the file) and context; of several rows, that of the last folder.

    The harvest measures everything: it is the arm `exhaustive` in contexts that no file of that name has.
    Raises `ValueError` where no folder holds a row.
    """
    arms: dict[str, dict[ContextId, dict[str, Any]]] = {}
    for path in (p for folder in folders for p in sorted(folder.glob("*.jsonl"))):
        rows = arms.setdefault("exhaustive" if path.stem == HARVEST else path.stem, {})
        own: dict[ContextId, dict[str, Any]] = {}
        for row in read_rows(path):
            own.setdefault(str(row["id"]), row)
        rows |= own
    if not any(arms.values()):
        raise ValueError(
            f"no *.jsonl with rows in {', '.join(map(str, folders))}: give folders of the other stages' --out"
        )
    return arms


def kernel_of(context: ContextId) -> str:
    """Library and kernel of a context."""
    workload, kernel, _ = json.loads(context)
    return f"{str(workload).partition('/')[0]}/{kernel}"


def list_class(n: int) -> str:
    """The class of a list of `n` configs, as text."""
    low, high = next(c for c in CLASSES if c[0] <= n <= c[1])
    return f"{low}-{high}" if math.isfinite(high) else f">{low - 1}"


def compare_arms(arms: Mapping[str, ArmRows]) -> Figures:
    """All figures: `arms`, `ratios` (others' wall seconds / ours), `contexts_in_common`, `noise`."""
    deciding = {name: rows for name, rows in arms.items() if not name.startswith(RETIME) and rows}
    retimed = arms.get(RETIME, {})
    result: Figures = {"arms": {}, "ratios": {}, "contexts_in_common": {}}
    floor = deciding.get(FLOOR, {})
    for name, rows in deciding.items():
        result["arms"][name] = arm_figures(rows)
        if name != FLOOR and (common := sorted(set(rows) & set(floor))):
            result["arms"][name]["over_floor"] = _over_floor(rows, floor, common)
        if regret := regret_figures(name, rows, retimed):
            result["arms"][name]["regret"] = regret
    for name, rows in deciding.items():
        for other, others in deciding.items():
            if name < other:
                result["contexts_in_common"][f"{name} & {other}"] = len(set(rows) & set(others))
        for ours in deciding:
            if _compares(name, ours) and set(rows) & set(deciding[ours]):
                result["ratios"][f"{name}/{ours}"] = wall_ratio(rows, deciding[ours])
    if retimed:
        again = [abs(math.log(row["again_ms"] / row["ms"][0])) for row in retimed.values()]
        result["noise"] = round(math.exp(statistics.median(again)) - 1, _PLACES)
    return result


def _compares(name: str, ours: str) -> bool:
    """Whether an arm is held against ours: on as many cores, or `triton.autotune`, which compiles on one, on any."""
    arm, _, cores = name.partition("_")
    own, _, own_cores = ours.partition("_")
    return own == OURS and arm not in (OURS, FLOOR) and (cores == own_cores or name == "triton")


def arm_figures(rows: ArmRows) -> Figures:
    """Figures of one arm by itself: wall seconds, the longest parts of the cost, and how much was measured."""
    walls = [float(row["wall_s"]) for row in rows.values()]
    costs = [row["cost"] for row in rows.values() if row.get("cost")]
    figures: Figures = {
        "contexts": len(rows),
        "kernels": len({kernel_of(c) for c in rows}),
        "candidates": sum(row["n"] for row in rows.values()),
        "median_candidates": statistics.median(row["n"] for row in rows.values()),
        "wall_s": round(sum(walls), 3),
        "median_s": round(statistics.median(walls), 4),
    }
    if costs:
        figures["measured"] = sum(row.get("measured") or 0 for row in rows.values())
        figures |= {part: round(sum(cost.get(part) or 0.0 for cost in costs), 3) for part in COST_PARTS}
    if parts := wall_parts(rows):
        figures["parts"] = parts
    return figures


def wall_parts(rows: ArmRows) -> Figures:
    """Return where the wall seconds of decisions went, in sum, as the clock outside the tuner saw it.

    Until the first compilation ended, from there until the last timing (but those in turns) ended, and from there until
    the call returned. Of decisions that compiled and timed something; empty without.
    """
    spans = []
    for row in rows.values():
        times = row.get("times") or {}
        if times.get("compiled") and times.get("timed"):
            first = min(end for _, _, end in times["compiled"])
            last = max(first, *(end for _, end, _ in times["timed"]))
            spans.append((first, last - first, row["wall_s"] - last))
    if not spans:
        return {}
    names = ("first_compiled_s", "measuring_s", "after_s")
    return {"contexts": len(spans)} | {
        name: round(sum(values), 3) for name, values in zip(names, zip(*spans, strict=True), strict=True)
    }


def wall_ratio(others: ArmRows, ours: ArmRows) -> Figures:
    """Wall seconds of another arm over ours in the contexts of both: all, and by the length of the list."""
    common = sorted(set(others) & set(ours))
    result = _ratio(others, ours, common)
    result["by_length"] = {}
    for low, high in CLASSES:
        chosen = [c for c in common if low <= ours[c]["n"] <= high]
        if chosen:
            result["by_length"][list_class(low)] = _ratio(others, ours, chosen)
    return result


def _ratio(others: ArmRows, ours: ArmRows, common: Sequence[ContextId]) -> Figures:
    theirs, mine = _walls(others, common), _walls(ours, common)
    return {
        "contexts": len(common),
        "other_s": round(float(theirs.sum()), 3),
        "ours_s": round(float(mine.sum()), 3),
        "slower_contexts": int((mine > theirs).sum()),
        **_interval("ratio", lambda rows: float(theirs[rows].sum() / mine[rows].sum()), common),
    }


def _over_floor(rows: ArmRows, floor: ArmRows, common: Sequence[ContextId]) -> Figures:
    logs = np.log(_walls(rows, common) / _walls(floor, common))
    return {
        "contexts": len(common),
        **_interval("geomean", lambda chosen: math.exp(float(logs[chosen].mean())), common),
    }


def regret_figures(arm: str, rows: ArmRows, retimed: ArmRows) -> Figures:
    """How much slower an arm's choices are than the best of their context, timed side by side; shares.

    Of contexts that were harvested: elsewhere nobody knows the best. Empty where none of its choices was timed again.
    """
    names = (arm, HARVEST) if arm == "exhaustive" else (arm,)
    regrets: dict[ContextId, float] = {}
    for context, row in retimed.items():
        place = next((row["arms"][name] for name in names if name in row["arms"]), None)
        if place is not None and context in rows and HARVEST in row["arms"]:
            regrets[context] = row["ms"][place] / min(row["ms"]) - 1
    if not regrets:
        return {}
    common = sorted(regrets)
    values = np.array([regrets[c] for c in common])
    risks = [rows[c]["risk"] for c in common if rows[c].get("risk") is not None]
    figures: Figures = {
        "contexts": len(common),
        "worst": round(float(values.max()), _PLACES),
        **_interval("geomean", lambda chosen: float(np.expm1(np.log1p(values[chosen]).mean())), common),
        **{
            f"beyond_{key}": value
            for key, value in _interval(
                "share", lambda chosen: float((values[chosen] > TOLERANCE).mean()), common
            ).items()
        },
    }
    if risks:
        figures["stated_risk"] = round(statistics.mean(risks), _PLACES)
    return figures


def _walls(rows: ArmRows, contexts: Sequence[ContextId]) -> _Floats:
    return np.array([float(rows[c]["wall_s"]) for c in contexts])


def _interval(
    name: str, statistic: Callable[[npt.NDArray[np.intp]], float], contexts: Sequence[ContextId]
) -> Figures:
    """`name`, and its interval as `low` and `high`: None where there is but one kernel."""
    result = cluster_bootstrap(statistic, [kernel_of(c) for c in contexts])
    figures: Figures = {name: round(result.value, _PLACES)}
    for end, value in (("low", result.low), ("high", result.high)):
        figures[end] = None if math.isnan(value) else round(value, _PLACES)
    return figures


def compact_rows(arms: Mapping[str, ArmRows]) -> list[Figures]:
    """A row per context with what each arm took and chose, and the times side by side."""
    results = []
    for context in sorted({c for rows in arms.values() for c in rows}):
        workload, kernel, key = json.loads(context)
        row: Figures = {"workload": workload, "kernel": kernel, "key": " ".join(key), "arms": {}}
        for name, rows in arms.items():
            if context not in rows:
                continue
            if name.startswith(RETIME):
                kept = {k: rows[context][k] for k in ("ms", "again_ms", "arms")}
                row["retimed"] = json.dumps(kept)
                continue
            own = rows[context]
            row["n"] = own["n"]
            cost = own.get("cost") or {}
            shown = {"wall_s": own["wall_s"], "measured": own.get("measured"), "risk": own.get("risk")}
            shown |= {part: cost.get(part) for part in COST_PARTS} | {"config": own["config"]}
            kept = {k: round(v, 4) if isinstance(v, float) else v for k, v in shown.items() if v is not None}
            row["arms"][name] = json.dumps(kept)
        results.append(row)
    return results
