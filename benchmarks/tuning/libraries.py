"""Claim: on kernels of public libraries, decisions cost a fraction of the time that `triton.autotune` takes.

    python -m benchmarks.tuning.libraries run --arms harvest --out FOLDER [--wheels FOLDER]
    python -m benchmarks.tuning.libraries run --arms harvest forecast before triton:0.1 retime --before TREE --out F
    python -m benchmarks.tuning.libraries replay --processes 30 --out FOLDER
    python -m benchmarks.tuning.libraries report --folders FOLDER... --out benchmarks/results/libraries.json
    python -m benchmarks.tuning.libraries pack --folders FOLDER... --out benchmarks/data/libraries_h200.jsonl.gz

Runs public operations of fla-core, liger-kernel and flag_gems (`benchmarks.lib.libraries.workloads`), forward and
backward, and writes a line for every decision that a tuner makes on the way: what it chose, and the wall seconds of
the call that decided. Every arm is a fresh process with an empty store and an empty Triton cache. The arms take turns
workload by workload, in an order by lot with `--seed`, so that a run that is cut short compares them on the same lists.

The arms: `harvest` (this project's mode that measures everything; in reports `exhaustive`) comes first, and leaves a
table of it without source or IR text; `forecast` (the default) and `again` (the same once more); `unadvised` (without
shipped advice); `untimed` (accepts a risk of 20 % of being beyond 10 %); `before` (as `forecast`, by the packages of
another checkout, `--before TREE`); `triton` (`triton.autotune`); `floor` (the harvest's winner alone: compiled,
launched and timed once). `ARM:SHARE` decides such a share of contexts by lot, and takes the harvest's winner elsewhere.
`retime` comes last: it times the choices of all arms whose files lie in FOLDER, with the harvest's best three, side by
side. An arm's memory (its processes') is the most that was seen.

`replay` decides recorded lists in fresh processes, shuffled, with noise of the clock drawn anew in each (`NoisyTable`),
and leaves a folder a process, from which `report` tells how often they agree.

`report` joins what runs left in some folders into a result file; of several rows of an arm and a context that of
the last folder counts, and the share of pairs of folders that chose the same config is the arm's agreement. `pack`
joins the harvests' tables, a row per candidate. All but `run` need no device.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.lib.environment import ROOT
from benchmarks.lib.libraries.contexts import ENVIRONMENT, ContextId, config_key, read_rows
from benchmarks.lib.libraries.installation import install_libraries, library_environment
from benchmarks.lib.processes.child_processes import child_environment
from benchmarks.lib.result_files import ResultFile, say
from forecast_autotune.features.traced_texts import collect_facts
from forecast_autotune.records import Candidate, Measurement
from forecast_autotune.records.candidate import IN_TURNS
from forecast_autotune.records.problem import FACTS
from forecast_autotune.records.table import Table, read_tables, write_tables
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.store.advice import advice_in
from forecast_autotune.store.files import ADVICE, StoreNotes
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.timing import SHORT_LAUNCH_S, pause_lengths
from forecast_autotune.tuning.loop import tune
from forecast_autotune.tuning.replays.replay import ReplayStore, load, task_of
from forecast_autotune.tuning.replays.table_measurer import TableMeasurer
from forecast_autotune.tuning.results import NEGLIGIBLE_GAIN
from forecast_integrations.triton.timer.timers import LaunchTimer, rounds_in_turns, rounds_of
from forecast_train.metrics import cluster_bootstrap

RECORDED = ROOT / "benchmarks" / "data" / "libraries_h200.jsonl.gz"
LONGEST_READING_S = 20.0
"""For the IR of one problem; IR not read by then has no facts."""
TEXT_SIZES = "text_sizes"
"""Key of a problem line: lines and characters of its IR by assignment, which compile seconds go by."""
_FLUSH_MS = {False: 0.08, True: 0.05}
"""Emptying the L2 before a launch, and before a replay."""
_ROUND_NOISE_MS, _ROUND_NOISE = 1.4e-4, 0.004
"""Deviation of a round of recorded launches: 0.14 us, and a share. An H200's are 3.4 % below 6 us (6 candidates), 2.3 %
below 10 (37), 0.9 % below 20 (46) and 0.7 % below 50 (66)."""
_KEPT_OF_EXTRA = ("shared", "registers", "spills", "forecast")


def text_free(table: Table) -> Table:
    """The table with facts in the place of IR, and without source, IR and messages, which may quote either."""
    rows = table.by_candidate()
    grids = {c: m.grid for c, m in rows.items() if m.grid is not None}
    problem = table.problem
    extra = dict(problem.extra)
    if problem.ttir:
        extra[FACTS] = collect_facts(problem, list(rows), grids, problem.ttir, within_s=LONGEST_READING_S)
        extra[TEXT_SIZES] = {name: [len(t.splitlines()), len(t)] for name, t in problem.ttir.items()}
    kernel = replace(problem.kernel, source="", extra={})
    return replace(
        table,
        problem=replace(problem, kernel=kernel, ttir={}, extra=extra),
        measurements=[_without_text(m) for m in one_row_per_candidate(table)],
    )


def one_row_per_candidate(table: Table) -> list[Measurement]:
    """The row that counts of each candidate (timed side by side, if it was), with what compiling it said.

    A time taken side by side is of a binary that was compiled before: its seconds and sizes are in an earlier row.
    """
    compiled: dict[Candidate, Measurement] = {}
    for m in table.measurements:
        if m.compile_s is not None:
            compiled.setdefault(m.candidate, m)
    rows = []
    for candidate, m in table.by_candidate().items():
        first = compiled.get(candidate, m)
        rows.append(replace(m, compile_s=first.compile_s, extra={**first.extra, **m.extra}))
    return rows


def _without_text(m: Measurement) -> Measurement:
    extra: dict[str, Any] = {k: v for k, v in m.extra.items() if k in _KEPT_OF_EXTRA}
    if "message" in m.extra:
        extra["error"] = str(m.extra["message"]).partition(":")[0][:60]
    return replace(m, extra=extra)


def write_text_free(tables: Sequence[Table], out: Path, processes: int) -> int:
    """Write tables to a file without any text of the kernels; returns the number of measurements."""
    with ProcessPoolExecutor(max(1, processes)) as pool:
        return write_tables(out, list(pool.map(text_free, tables)))


def pack_tables(folders: Sequence[Path], out: Path) -> int:
    """Join the tables that harvests left in folders, a row per candidate; returns the number of measurements.

    A problem's label is the workload that met it. The last folder counts for a problem that was harvested twice, and
    for its decision. Raises `ValueError` where a problem holds source or IR.
    """
    packed: dict[str, Table] = {}
    for folder in folders:
        workloads = {
            str(row.get("problem")): json.loads(row["id"])[0] for row in read_rows(folder / "harvest.jsonl")
        }
        for table in read_tables(folder / "harvest_table.jsonl.gz"):
            problem = table.problem
            if problem.kernel.source or problem.ttir:
                raise ValueError(
                    f"{folder}: problem {problem.id} ({problem.kernel.name}) holds source or IR, which must not be "
                    "packed: give a folder whose harvest_table.jsonl.gz the stage harvest wrote"
                )
            if problem.id in workloads:
                labelled = replace(problem, extra={**problem.extra, "label": workloads[problem.id]})
                packed[problem.id] = Table(labelled, one_row_per_candidate(table))
    return write_tables(out, list(packed.values()))


ArmRows = Mapping[ContextId, Mapping[str, Any]]
"""Decisions of one arm by context."""

HARVEST, RETIME, FLOOR, OURS, AGAIN = "harvest", "retime", "floor", "forecast", "again"
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


def agreements(folders: Sequence[Path]) -> Figures:
    """By arm that several runs hold: the share of pairs of them that chose alike, in contexts that all decided.

    `class_share` counts those alike, too, of which one's choice was within the noise of the other's.
    """
    result: Figures = {}
    runs = [{arm: rows for arm, rows in read_arms([folder]).items() if arm != RETIME} for folder in folders]
    runs += [{OURS: run[AGAIN]} for run in runs if AGAIN in run]
    for arm in sorted({arm for run in runs for arm in run}):
        chosen = [run[arm] for run in runs if arm in run]
        common = sorted(set.intersection(*map(set, chosen)))
        if len(chosen) > 1 and common:
            pairs = list(itertools.combinations(chosen, 2))
            result[arm] = {"runs": len(chosen), "contexts": len(common)}
            for name, test in (("share", same_choice), ("class_share", same_class)):
                alike = np.array([[test(a[c], b[c]) for a, b in pairs] for c in common]).mean(axis=1)
                if test is same_choice:
                    result[arm]["always"] = int((alike == 1).sum())
                    for library in sorted(set(names := [kernel_of(c).partition("/")[0] for c in common])):
                        result[arm][f"share_{library}"] = round(
                            float(alike[[n == library for n in names]].mean()), _PLACES
                        )
                ends = _interval(name, lambda rows, alike=alike: float(alike[rows].mean()), common)
                result[arm] |= {k if k == name else f"{name}_{k}": v for k, v in ends.items()}
    return result


def same_choice(one: Figures, other: Figures) -> bool:
    """Whether two rows chose the same config."""
    return config_key(one["config"]) == config_key(other["config"])


def same_class(one: Figures, other: Figures) -> bool:
    """Whether two rows chose the same config, or one chose a config that tied with the other's choice."""
    ties = [{json.dumps(tie, sort_keys=True) for tie in row.get("ties") or ()} for row in (one, other)]
    ours, theirs = (json.dumps(row.get("candidate"), sort_keys=True) for row in (one, other))
    return same_choice(one, other) or ours in ties[1] or theirs in ties[0]


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
                if more := more_regret(ours, name, deciding, retimed):
                    result["ratios"][f"{name}/{ours}"]["more_regret"] = more
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
        "longest_s": round(max(walls), 3),
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
    the call returned. Only decisions that compiled and timed something count; empty without.
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

    Only harvested contexts count: elsewhere nobody knows the best. Empty where none of its choices was timed again.
    """
    regrets = regrets_of(arm, rows, retimed)
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
    if untimed := [c for c in common if rows[c].get("measured") == 0 and rows[c].get("risk") is not None]:
        figures["untimed"] = {
            "contexts": len(untimed),
            "stated_risk": round(statistics.mean(rows[c]["risk"] for c in untimed), _PLACES),
            "beyond": {
                f"{share:.0%}": sum(regrets[c] > share for c in untimed) for share in (0.02, 0.05, 0.1)
            },
            "worst": round(max(regrets[c] for c in untimed), _PLACES),
        }
    return figures


def regrets_of(arm: str, rows: ArmRows, retimed: ArmRows) -> dict[ContextId, float]:
    """By how much each choice of an arm is slower than the best that was timed beside it; of harvested contexts."""
    names = (arm, HARVEST) if arm == "exhaustive" else (arm,)
    regrets: dict[ContextId, float] = {}
    for context, row in retimed.items():
        place = next((row["arms"][name] for name in names if name in row["arms"]), None)
        if place is not None and context in rows and HARVEST in row["arms"]:
            regrets[context] = row["ms"][place] / min(row["ms"]) - 1
    return regrets


def more_regret(ours: str, other: str, arms: Mapping[str, ArmRows], retimed: ArmRows) -> Figures:
    """Mean difference of two arms' regrets in the contexts of both: positive where ours is worse."""
    mine, theirs = (regrets_of(arm, arms[arm], retimed) for arm in (ours, other))
    common = sorted(set(mine) & set(theirs))
    if not common:
        return {}
    more = np.array([mine[c] - theirs[c] for c in common])
    return _interval("mean", lambda rows: float(more[rows].mean()), common)


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


ARMS = ("harvest", "forecast", "again", "before", "unadvised", "untimed", "triton", "floor", "retime")
ENVIRONMENTS = {
    "harvest": {"FORECAST_AUTOTUNE_MODE": "exhaustive"},
    "unadvised": {"FORECAST_AUTOTUNE_ADVICE": "off"},
    "untimed": {"FORECAST_AUTOTUNE_RISK": "0.2", "FORECAST_AUTOTUNE_TOLERANCE": "0.1"},
}
UNSERVED = ("triton", "floor", "retime")
GRACE_S = 60.0
"""A workload that started in time may take this much longer."""


def main() -> None:
    """Run arms, or join what they left."""
    a = _arguments()
    if a.stage == "replay":
        seeds, context = range(a.processes), multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(a.cores or None, mp_context=context, max_tasks_per_child=1) as pool:
            list(pool.map(replay_process, seeds, [a.out / f"process{seed}" for seed in seeds]))
        return
    if a.stage != "run":
        report(a) if a.stage == "report" else say(f"table: {pack_tables(a.folders, a.out)} measurements")
        return
    a.out.mkdir(parents=True, exist_ok=True)
    scratch = a.scratch or Path(tempfile.gettempdir()) / "library-benchmark"
    scratch.mkdir(parents=True, exist_ok=True)
    run_arms(a, scratch.absolute(), install_libraries(scratch / "site", a.wheels))
    if any(arm.startswith("harvest") for arm in a.arms):
        tables = list(Store(scratch / _file_name(a, "harvest") / "store").tables(None, None))
        if a.keep_texts is not None:
            write_tables(a.keep_texts, tables)
        count = write_text_free(tables, a.out / "harvest_table.jsonl.gz", len(os.sched_getaffinity(0)))
        say(f"table: {count} measurements of {len(tables)} problems")


def _arguments() -> Namespace:
    command_line = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = command_line.add_argument
    add("stage", choices=("run", "replay", "report", "pack"))
    add("--out", type=Path, required=True, help="the folder of all arms' files, or the file")
    add("--folders", type=Path, nargs="+", default=[], help="report, pack: folders of runs")
    add("--arms", nargs="+", default=["forecast"], metavar="ARM[:SHARE]", help=", ".join(ARMS))
    add("--wheels", type=Path, help="a folder of wheels, for a machine without network")
    add("--before", type=Path, help="a checkout of this project, whose packages the arm `before` takes")
    add("--only", nargs="+", default=[], metavar="NAME", help="workloads, or how they begin")
    add("--seconds", type=float, default=480.0, help="no workload starts later than this")
    add("--workers", type=int, default=0, help="compilations at a time (default: one a core)")
    add("--cores", type=int, default=0, help="cores that an arm may use (default: all)")
    add("--seed", type=int, help="of the order of workloads and of shares (default: libraries in turns)")
    add("--processes", type=int, default=30, help="replay: fresh processes")
    add("--order", type=int, help="a seed by which every list of configs is shuffled")
    add("--rounds", type=int, default=200, help="retime: launches of each config")
    add("--keep-texts", type=Path, help="harvest: a private table file with source and IR, too")
    add("--scratch", type=Path, help="where stores and caches go (default: a temporary folder)")
    add("--null", action="store_true", help="no GPU: kernels are compiled, and their times are made up")
    a = command_line.parse_args()
    names = [arm.partition(":")[0] for arm in a.arms]
    if unknown := sorted(set(names) - set(ARMS)):
        command_line.error(f"no arm is called {', '.join(unknown)}; there are: {', '.join(ARMS)}")
    if "before" in names and a.before is None:
        command_line.error("the arm before needs --before FOLDER, a checkout to compare with")
    needing = [arm for arm in a.arms if arm == "floor" or ":" in arm]
    if needing and "harvest" not in names and not (a.out / "harvest.jsonl").is_file():
        command_line.error(f"{', '.join(needing)} take winners of the arm harvest: run it, too")
    if a.stage in ("report", "pack") and not a.folders:
        command_line.error(f"{a.stage} needs --folders FOLDER..., the --out of runs")
    return a


def report(a: Namespace) -> None:
    """Join the arms' files into a result file."""

    arms = read_arms(a.folders)
    result = ResultFile(Namespace(out=a.out, stage=a.stage, folders=a.folders), "libraries")
    runs = {
        f"{folder.name}/{path.name.removesuffix(ENVIRONMENT)}": json.loads(path.read_text(encoding="utf-8"))
        for folder in a.folders
        for path in sorted(folder.glob("*" + ENVIRONMENT))
    }
    ours = [
        run["environment"] for name, run in runs.items() if name.rpartition("/")[2].startswith("forecast")
    ]
    result.data["environment"] |= ours[-1] if ours else {}
    result.data["raw"] = {"runs": runs, "contexts": compact_rows(arms)}
    memory = {name: max(run["megabytes"].values()) for name, run in runs.items() if run.get("megabytes")}
    result.finish(compare_arms(arms) | {"agreement": agreements(a.folders), "megabytes": memory})


class NoisyTable(TableMeasurer):
    """Answers from a recorded table with noise: of compile seconds, of each look, and of finalists in turns.

    The deviations of looks are those of two recorded timings of one config on two H200s, by how long it takes. Of
    finalists each launch is drawn, with the deviation of the recorded ones, as many as the live clock would take.
    """

    _LOOKS = ((0.01, 0.024), (0.02, 0.015), (0.05, 0.0073), (math.inf, 0.0031))
    """Milliseconds below which a look has such a deviation, as a share."""

    def __init__(self, table: Table, draw: random.Random) -> None:
        super().__init__(table)
        self._draw, self.final_ms = draw, 0.0
        self._seconds = {c: s * math.exp(draw.gauss(0.0, 0.1)) for c, s in self._seconds.items()}

    def measure(self, candidates: Sequence[Candidate], **options: Any) -> Iterator[Measurement]:
        """As the table, with noise."""
        for m in super().measure(candidates, **options):
            deviation = next((d for most_ms, d in self._LOOKS if m.ok and m.ms < most_ms), 0.0)
            yield self._noisy(m, deviation, "") if m.ok else m

    def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        """Each finalist by launches with the noise of the recorded ones."""
        super().compare(candidates)
        rows = [m for m in map(self._row, candidates) if m.ok]
        # Short launches are recorded and timed by the round: their noise is the device's, and not that of these tables.
        ways = len(pause_lengths()) if min(m.ms for m in rows) <= 1e3 * SHORT_LAUNCH_S else 1
        deviations = [
            math.hypot(_ROUND_NOISE_MS, _ROUND_NOISE * m.ms)
            if ways > 1
            # A median errs by so much more than a mean.
            else m.error_ms * math.sqrt(m.repeats) / 1.253
            for m in rows
        ]

        def launch(left: list[int], rounds: int) -> list[list[float]]:
            return [[self._draw.gauss(rows[i].ms, deviations[i]) for _ in range(rounds)] for i in left]

        rounds = rounds_of(max(m.ms for m in rows), ways, LaunchTimer.compare_ms)
        times = rounds_in_turns(launch, len(rows), rounds, ways == 1, NEGLIGIBLE_GAIN)
        self.final_ms += sum(
            ways * len(t) * (m.ms + _FLUSH_MS[ways > 1]) for m, t in zip(rows, times, strict=True)
        )
        timed = [Measurement.of_times(m.problem, m.candidate, t) for m, t in zip(rows, times, strict=True)]
        return [
            replace(self._noisy(t, 0.0, IN_TURNS), protocol=m.protocol.removesuffix(IN_TURNS) + IN_TURNS)
            for m, t in zip(rows, timed, strict=True)
        ]

    def _noisy(self, m: Measurement, deviation: float, protocol_end: str) -> Measurement:
        times = 1.0 + self._draw.gauss(0.0, deviation)
        low, high = (None if ms is None else ms * times for ms in (m.p20_ms, m.p80_ms))
        protocol = m.protocol.removesuffix(IN_TURNS) + protocol_end
        return replace(m, median_ms=m.ms * times, p20_ms=low, p80_ms=high, protocol=protocol)


def replay_process(seed: int, out: Path) -> None:
    """Decide the recorded lists in an order of configs by lot, and write rows as a run does."""
    draw, rows = random.Random(seed), dict[str, list[Figures]]()
    for table in load([RECORDED]):
        task = task_of(table)
        task.candidates = draw.sample(list(task.candidates), len(task.candidates))
        if table.problem.extra.get(ADVICE) is not None:
            task.advice = advice_in(table.problem, StoreNotes())
        measurer = NoisyTable(table, draw)
        decision = tune(
            task,
            lambda measurer=measurer: measurer,  # type: ignore[misc]
            store=ReplayStore([]),
            surrogate=default_surrogate(),
            settings=Settings(),
        )
        ms = {c: m.ms for c, m in table.by_candidate().items() if m.ok}
        best, about = min(ms, key=ms.__getitem__), table.problem
        name = json.dumps([about.extra.get("label"), about.kernel.name, [about.id]])
        row: Figures = {"id": name, "n": len(task.candidates), "wall_s": measurer.spent().wall_s}
        mine = {"config": decision.chosen.config.to_json(), "candidate": decision.chosen.to_json()}
        mine |= {"ties": [c.to_json() for c in decision.ties], "measured": decision.measured}
        mine |= {"final_ms": round(measurer.final_ms, 3)}
        rows.setdefault(OURS, []).append(row | mine | {"risk": decision.stated_risk})
        rows.setdefault(HARVEST, []).append(row | {"config": best.config.to_json()})
        times = {"ms": [ms[decision.chosen], ms[best]], "again_ms": ms[decision.chosen]}
        rows.setdefault(RETIME, []).append({"id": name, **times, "arms": {OURS: 0, HARVEST: 1}})
    out.mkdir(parents=True, exist_ok=True)
    for arm, lines in rows.items():
        (out / f"{arm}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
        )


def _file_name(a: Namespace, arm: str) -> str:
    return arm if not a.cores or a.cores >= len(os.sched_getaffinity(0)) else f"{arm}_{a.cores}cores"


def run_arms(a: Namespace, scratch: Path, site: Path) -> None:
    """Run the arms in turns, a workload at a time: the harvest first, `retime` last, the others in changing order."""
    begin = time.perf_counter()
    arms = [ArmProcess(a, arm, scratch, site) for arm in sorted(a.arms, key=_place)]
    try:
        known = [arm.answer(GRACE_S) for arm in arms]
        names: list[str] = next(list(one["workloads"]) for one in known if one)
        if a.seed is not None:
            random.Random(a.seed).shuffle(names)
        fixed = [arm for arm in arms if _place(arm.arm) != 1]
        for i, name in enumerate(names):
            if time.perf_counter() - begin > a.seconds:
                say(f"time is up before {name}")
                break
            turns = [arm for arm in arms if arm not in fixed]
            turns = turns[i % len(turns) :] + turns[: i % len(turns)] if turns else []
            for arm in sorted([*fixed, *turns], key=lambda arm: _place(arm.arm)):
                arm.run(name, begin + a.seconds + GRACE_S - time.perf_counter())
    finally:
        for arm in arms:
            arm.end()
        for arm in arms:
            arm.stop()
    for arm in arms:
        rows = list(read_rows(arm.out))
        walls = sum(
            row.get("wall_s", 0.0) for row in rows
        )  # the arm retime writes times, and decides nothing
        say(f"{arm.out.stem}: {len(rows)} rows of {walls:.1f} s, {arm.seconds:.0f} s with all else")


def _place(arm: str) -> int:
    """The harvest is the first in a turn, retime the last."""
    return {"harvest": 0, "retime": 2}.get(arm, 1)


class ArmProcess:
    """A fresh process of one arm with empty caches; it runs the workloads that it is given, one at a time."""

    def __init__(self, a: Namespace, arm: str, scratch: Path, site: Path) -> None:
        self.arm, _, share = arm.partition(":")
        name = _file_name(a, self.arm)
        home = scratch / name
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        self.out, self.seconds = (a.out / f"{name}.jsonl").absolute(), 0.0
        self.out.unlink(missing_ok=True)
        self._megabytes: dict[str, float] = {}
        given = {"arm": self.arm, "out": str(self.out), "folder": str(self.out.parent), "only": a.only}
        given |= {"rounds": a.rounds, "null": a.null, "order": a.order}
        given |= {"share": float(share or 1), "seed": a.seed}
        command = [sys.executable]
        if self.arm not in UNSERVED:
            command += ["-m", "forecast_autotune", "run"]
        command += ["-m", "benchmarks.lib.libraries.watching", json.dumps(given)]
        cores = sorted(os.sched_getaffinity(0))
        self._child = subprocess.Popen(
            command,
            env=arm_environment(a, self.arm, home, site),
            cwd=home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores[: a.cores] if a.cores else cores),
        )

    def run(self, workload: str, within_s: float) -> None:
        """Run one workload to its end; a process that takes longer is stopped, and runs no other."""
        if self._child.poll() is not None:
            return
        begin = time.perf_counter()
        assert self._child.stdin is not None
        self._child.stdin.write(workload.encode() + b"\n")
        done = self.answer(within_s, workload)
        self.seconds += time.perf_counter() - begin
        say(f"{self.out.stem} {workload}: {done or 'given up'}")
        about = self.out.with_suffix(ENVIRONMENT)
        text = json.loads(about.read_text(encoding="utf-8")) | {"megabytes": self._megabytes}
        about.write_text(json.dumps(text) + "\n", encoding="utf-8")

    def answer(self, within_s: float, workload: str = "") -> Figures:
        """The next line of JSON that the process says, other lines shown; empty where it ends or says nothing in time.

        With a workload, the memory of its processes is sampled meanwhile.
        """
        assert self._child.stdout is not None
        until, pause = time.perf_counter() + within_s, 0.1
        while time.perf_counter() < until:
            if not select.select([self._child.stdout], [], [], pause)[0]:
                if workload:
                    begin = time.perf_counter()
                    used = session_megabytes(self._child.pid)
                    self._megabytes[workload] = max(used, self._megabytes.get(workload, 0.0))
                    pause = max(0.1, 3 * (time.perf_counter() - begin))
                continue
            line = self._child.stdout.readline().decode(errors="replace")
            if line.startswith("{"):
                answer: Figures = json.loads(line)
                return answer
            if not line:
                break
            print(f"{self.out.stem}: {line}", end="", flush=True)
        self.stop(patience_s=0.0)
        return {}

    def end(self) -> None:
        """Name no more workloads: the process ends."""
        assert self._child.stdin is not None
        self._child.stdin.close()

    def stop(self, patience_s: float = 10.0) -> None:
        """Let the process end by itself, and stop all of it where it does not."""
        self.end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()


def session_megabytes(session: int) -> float:
    """Megabytes that the processes of a session hold: their own (forked copies share it), and files of the largest.

    Where the system does not tell the two apart, the sum of all their memory.
    """
    own, files = 0, [0]
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) != session:
                continue
            resident, shared = (4 * int(pages) for pages in (folder / "statm").read_text().split()[1:3])
            try:
                text = (folder / "smaps_rollup").read_text()
            except OSError:
                own += resident
                continue
            own += sum(int(x.split()[1]) for x in text.splitlines() if x.startswith("Pss_Anon:"))
            files.append(shared)
    return round((own + max(files)) / 1024, 1)


def arm_environment(a: Namespace, arm: str, home: Path, site: Path) -> dict[str, str]:
    """The environment of an arm's process: empty caches, the libraries, and the packages it is to import."""
    checkouts = [a.before.absolute(), ROOT] if arm == "before" else [ROOT]
    more = library_environment(site.absolute(), home, checkouts) | ENVIRONMENTS.get(arm, {})
    if a.workers and arm not in UNSERVED:
        more["FORECAST_AUTOTUNE_WORKERS"] = str(a.workers)
    if arm == "retime":  # whatever was chosen is compiled there
        more["TRITON_CACHE_DIR"] = str(home.with_name(home.name.replace("retime", "harvest")) / "triton")
    return child_environment(home, **more)


if __name__ == "__main__":
    main()
