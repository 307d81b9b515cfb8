"""Claim: on lists of public libraries, decisions by wall time are fast and as sure as they say, on any number of cores.

    python -m benchmarks.tuning.library_replay --out benchmarks/results/library_replay.json [--models FOLDER]

Replays the recorded lists of `benchmarks/data/libraries_h200.jsonl.gz` with their recorded seconds of compilation on 1
to 64 simulated workers, under three policies: everything (`exhaustive`), rounds by risk (`risk`), and the default
(`wall-time`). Wall seconds are simulated (compiling in parallel, timing one at a time), without those of forecasting.
The floor is the best config alone, compiled and timed once. Beside one config after the other, as `triton.autotune`
compiles and times, tracing counts as well, by an estimate. Needs no device.

The surrogate must not have seen the library: the one that ships was fitted to kernels of the benchmark package alone.
`--models FOLDER` takes another for each library, `fla.npz` and so on. It is compared with the cost formula that learns
from measurements alike, kernels drawn in pairs. All intervals are 95 %, by bootstrap over kernels.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.lib.environment import ROOT
from benchmarks.lib.libraries.comparison import list_class
from benchmarks.lib.libraries.workloads import LIBRARIES
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.policy import Exhaustive, Policy, RiskBounded, WallTime
from forecast_autotune.records import Measurement
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.learned import LearnedModel, LearnedSurrogate
from forecast_autotune.tuning.first_compilations import is_traced_in_vain
from forecast_autotune.tuning.host_seconds import EXHAUSTIVE_TIMING_S
from forecast_autotune.tuning.loop import tune
from forecast_autotune.tuning.replays.replay import ReplayStore, load, task_of
from forecast_autotune.tuning.replays.table_measurer import TIMING_S, TableMeasurer, recorded_compile_seconds
from forecast_train.evaluation.bootstrap import cluster_bootstrap

TABLES = ROOT / "benchmarks" / "data" / "libraries_h200.jsonl.gz"
LIVE = ROOT / "benchmarks" / "results" / "libraries.json"
WORKERS = (1, 2, 4, 8, 16, 64)
POLICIES: dict[str, Callable[[], Policy]] = {
    "exhaustive": Exhaustive,
    "risk": RiskBounded,
    "wall-time": WallTime,
}
DEFAULT, COMPARED_WORKERS = "wall-time", 16
TRACE_S = 0.12
"""Seconds of a core to trace a text of these kernels and read it, about, which are not simulated."""
FAILED_REGRET = 9.0
"""Of a choice that cannot run: tenfold time."""
BUDGETS = (1, 3, 5)
"""Measurements after which learned and formula are compared."""


@dataclass(frozen=True)
class ReplayedDecision:
    """One list, decided once."""

    table: str
    """The problem's id."""
    kernel: str
    label: str
    key: str
    candidates: int
    arm: str
    """`learned` or `formula`."""
    policy: str
    workers: int
    measured: int
    wall_s: float
    """Simulated, without forecasting."""
    floor_s: float
    one_by_one_s: float
    """Compiled and timed one config after the other, as `triton.autotune` does: estimated."""
    trace_s: float
    """To trace all texts on these workers: estimated; 0 where nothing is traced."""
    regret: float
    """time(chosen) / time(best) - 1."""
    stated_risk: float
    forecast_s: float
    """Real seconds of this machine."""


def replay_decision(
    table: Table, surrogate: DefaultSurrogate, arm: str, policy: str, workers: int, settings: Settings
) -> ReplayedDecision:
    """Decide a recorded list from scratch under one of `POLICIES`."""
    rows, seconds = table.by_candidate(), recorded_compile_seconds(table)
    candidates = CandidateList.of(rows)
    traced = POLICIES[policy] is not WallTime or not is_traced_in_vain(candidates, workers)
    best = min((m for m in rows.values() if m.ok), key=lambda m: m.ms)
    measurer = TableMeasurer(table, workers=workers, timing_s=TIMING_S)
    decision = tune(
        task_of(table),
        lambda: measurer,
        store=ReplayStore(()),
        surrogate=surrogate,
        settings=settings,
        policy=POLICIES[policy](),
    )
    return ReplayedDecision(
        table=table.problem.id,
        kernel=table.problem.kernel.name,
        label=str(table.problem.extra["label"]),
        key=" ".join(map(str, table.problem.key)),
        candidates=len(rows),
        arm=arm,
        policy=policy,
        workers=workers,
        measured=decision.measured,
        wall_s=round(measurer.spent().wall_s, 4),
        floor_s=round(seconds[best.candidate] + TIMING_S, 4),
        one_by_one_s=round(sum(seconds.values()) + EXHAUSTIVE_TIMING_S * len(rows), 4),
        trace_s=round(TRACE_S * len(candidates.assignments[0]) / workers, 4) if traced else 0.0,
        regret=regret_beside(rows[decision.chosen], best),
        stated_risk=round(decision.stated_risk, 5),
        forecast_s=round(decision.cost.forecast_s, 4),
    )


def regret_beside(chosen: Measurement, best: Measurement) -> float:
    """time(chosen) / time(best) - 1; `FAILED_REGRET` for a choice that cannot run."""
    return round(chosen.ms / best.ms - 1, 6) if chosen.ok else FAILED_REGRET


def library_of(table: Table) -> str:
    """The library of a table's workload."""
    return str(table.problem.extra["label"]).partition("/")[0]


def open_surrogate(models: Path | None, library: str) -> DefaultSurrogate:
    """The learned surrogate that has not seen a library: the one that ships, or that of `models`."""
    if models is None:
        return DefaultSurrogate()
    return DefaultSurrogate(LearnedSurrogate(LearnedModel.load(models / f"{library}.npz")))


def replay_library(library: str, models: Path | None, arm: str) -> list[dict[str, Any]]:
    """All policies and numbers of workers on the lists of a library; then, on few measurements, the default's."""
    warnings.simplefilter("ignore")
    tables = [t for t in load([TABLES]) if library_of(t) == library]
    surrogate = open_surrogate(models, library) if arm == "learned" else DefaultSurrogate(AnalyticSurrogate())
    found: list[dict[str, Any]] = []
    for table in tables:
        for policy in POLICIES if arm == "learned" else (DEFAULT,):
            for workers in WORKERS if arm == "learned" else (COMPARED_WORKERS,):
                row = asdict(replay_decision(table, surrogate, arm, policy, workers, Settings()))
                found.append({**row, "budget": None})
        for budget in BUDGETS:
            few = replace(Settings(), max_measurements=budget, risk=0.001)
            # One worker: candidates are measured in the order of the forecasts, one after the other.
            row = asdict(replay_decision(table, surrogate, arm, "risk", 1, few))
            found.append({**row, "budget": budget})
    return found


Rows = Sequence[Mapping[str, Any]]
Floats = npt.NDArray[np.float64]


def figures(rows: Rows, exhaustive: Rows) -> dict[str, Any]:
    """Of decisions under one policy, and those under `exhaustive` on the same lists in the same order."""
    kernels = [r["kernel"] for r in rows]
    walls, everything = column(rows, "wall_s"), column(exhaustive, "wall_s")
    less = column(rows, "one_by_one_s") / (walls + column(rows, "trace_s"))
    return {
        "contexts": len(rows),
        "kernels": len(set(kernels)),
        "wall_s": round(float(walls.sum()), 2),
        "measured": int(column(rows, "measured").sum()),
        "candidates": int(column(rows, "candidates").sum()),
        "speedup_over_exhaustive": interval(lambda i: float(everything[i].sum() / walls[i].sum()), kernels),
        "speedup_over_one_by_one": interval(lambda i: math.exp(float(np.log(less[i]).mean())), kernels),
        "least_speedup_over_one_by_one": round(float(less.min()), 4),
        **decision_figures(rows),
    }


def decision_figures(rows: Rows) -> dict[str, Any]:
    """What decisions cost beside the floor, and how good and how sure they are; intervals over kernels."""
    kernels = [str(r["kernel"]) for r in rows]
    walls, regrets = column(rows, "wall_s"), column(rows, "regret")
    over = np.log(walls / column(rows, "floor_s"))
    beyond = regrets > Settings().tolerance + 1e-9
    return {
        "median_s": round(float(np.median(walls)), 4),
        "stated_risk": round(float(column(rows, "stated_risk").mean()), 5),
        "over_floor": interval(lambda i: math.exp(float(over[i].mean())), kernels),
        "regret": interval(lambda i: float(np.expm1(np.log1p(regrets[i]).mean())), kernels),
        "beyond_tolerance": interval(lambda i: float(beyond[i].mean()), kernels),
    }


def compare_surrogates(rows: Rows) -> dict[str, Any]:
    """Learned beside formula on the same lists: regret after few measurements, and by the default policy.

    `less` is how much slower the formula's choices are than the learned surrogate's, a share: positive where the
    learned one is ahead.
    """
    found: dict[str, Any] = {}
    for name, budget in [*((f"after_{n}", n) for n in BUDGETS), ("default", None)]:
        arms = [
            sorted_rows(
                r
                for r in rows
                if r["arm"] == arm
                and r["budget"] == budget
                and (budget is not None or (r["policy"], r["workers"]) == (DEFAULT, COMPARED_WORKERS))
            )
            for arm in ("learned", "formula")
        ]
        kernels = [r["kernel"] for r in arms[0]]
        learned, formula = (np.log1p(column(arm, "regret")) for arm in arms)
        found[name] = {
            "learned": round(float(np.expm1(learned.mean())), 5),
            "formula": round(float(np.expm1(formula.mean())), 5),
            "less": interval(partial(_mean_ratio, formula - learned), kernels),
        }
        if budget is None:
            walls = [column(arm, "wall_s") for arm in arms]
            found[name]["wall_ratio"] = interval(partial(_ratio_of_sums, walls[1], walls[0]), kernels)
            for arm, own in zip(("learned", "formula"), arms, strict=True):
                found[name][f"{arm}_measured"] = int(column(own, "measured").sum())
    return found


def _mean_ratio(logs: Floats, chosen: npt.NDArray[np.intp]) -> float:
    return float(np.expm1(logs[chosen].mean()))


def _ratio_of_sums(one: Floats, other: Floats, chosen: npt.NDArray[np.intp]) -> float:
    return float(one[chosen].sum() / other[chosen].sum())


def column(rows: Rows, name: str) -> Floats:
    """One figure of every row, [n]."""
    return np.array([r[name] for r in rows], float)


def sorted_rows(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows in an order that is the same for every arm and policy."""
    return sorted(rows, key=lambda r: str(r["table"]))


def interval(statistic: Callable[[npt.NDArray[np.intp]], float], kernels: Sequence[str]) -> dict[str, Any]:
    """`value`, `low` and `high`; the ends are None with fewer than two kernels."""
    made = cluster_bootstrap(statistic, kernels)
    ends = [None if math.isnan(end) else round(end, 5) for end in (made.low, made.high)]
    return {"value": round(made.value, 5), "low": ends[0], "high": ends[1]}


def summarise(rows: Rows) -> dict[str, Any]:
    """Figures by policy and number of workers, and by the length of lists; learned beside formula."""
    whole = [r for r in rows if r["budget"] is None and r["arm"] == "learned"]
    policies: dict[str, Any] = {}
    for name in POLICIES:
        policies[name] = {}
        for workers in WORKERS:
            own = sorted_rows(r for r in whole if (r["policy"], r["workers"]) == (name, workers))
            every = sorted_rows(r for r in whole if (r["policy"], r["workers"]) == ("exhaustive", workers))
            shown = figures(own, every)
            shown["by_length"] = {}
            for length in dict.fromkeys(list_class(n) for n in sorted(r["candidates"] for r in own)):
                places = [i for i, r in enumerate(own) if list_class(r["candidates"]) == length]
                shown["by_length"][length] = figures([own[i] for i in places], [every[i] for i in places])
            policies[name][str(workers)] = shown
    lists = [r for r in whole if (r["policy"], r["workers"]) == (DEFAULT, COMPARED_WORKERS)]
    return {
        "contexts": len(lists),
        "kernels": len({r["kernel"] for r in lists}),
        "median_candidates": statistics.median(r["candidates"] for r in lists),
        "policies": policies,
        "triton_over_one_by_one": beside_triton(lists),
        "learned_and_formula": compare_surrogates(rows),
    }


def beside_triton(rows: Rows) -> dict[str, Any]:
    """What `triton.autotune` took on a device over what is estimated here, on the lists where it was timed."""
    live: dict[tuple[str, ...], float] = {}
    for context in json.loads(LIVE.read_text())["raw"]["contexts"]:
        if (told := context["arms"].get("triton")) is not None:
            live[context["workload"], context["kernel"], context["key"]] = json.loads(told)["wall_s"]
    both = [(live.get((r["label"], r["kernel"], r["key"])), float(r["one_by_one_s"])) for r in rows]
    ratios = [took / estimate for took, estimate in both if took is not None]
    if not ratios:
        return {"contexts": 0}
    return {
        "contexts": len(ratios),
        "value": round(statistics.geometric_mean(ratios), 4),
        "least": round(min(ratios), 4),
        "most": round(max(ratios), 4),
    }


def run(a: Namespace) -> dict[str, Any]:
    """Replay everything; returns the summary, after writing it."""
    report = ResultFile(a, "library_replay", 0)
    work = [(library, a.models, arm) for library in LIBRARIES for arm in ("learned", "formula")]
    rows: list[dict[str, Any]] = []
    # Not forked: torch, which the result file asks for its version, has threads.
    with ProcessPoolExecutor(a.jobs, get_context("spawn")) as pool:
        for done in pool.map(replay_library, *zip(*work, strict=True)):
            rows += done
            say(f"{len(rows)} decisions")
    summary = summarise(rows)
    compared = [r for r in rows if r["budget"] is None and r["workers"] == COMPARED_WORKERS]
    report.data["raw"] = {"decisions": compared}
    report.finish(summary)
    return summary


def main() -> int:
    made = parser(__doc__)
    made.add_argument(
        "--models", type=Path, help="a folder of models, each fitted without the library it is named by"
    )
    made.add_argument("--jobs", type=int, default=2, help="processes")
    a = parse_arguments(made, on_host=True)
    run(a)
    return 0


if __name__ == "__main__":
    sys.exit(main())
