"""Claim: on kernels of public libraries, decisions cost a fraction of the time that `triton.autotune` takes.

    python -m benchmarks.tuning.libraries harvest --out FOLDER [--wheels FOLDER]
    python -m benchmarks.tuning.libraries pick --arm forecast --out FOLDER [--cores 4] [--wheels FOLDER]
    python -m benchmarks.tuning.libraries retime --out FOLDER [--wheels FOLDER]
    python -m benchmarks.tuning.libraries report --folders FOLDER... --out benchmarks/results/libraries.json
    python -m benchmarks.tuning.libraries pack --folders FOLDER... --out benchmarks/data/libraries_h200.jsonl.gz

Runs public operations of fla-core, liger-kernel and flag_gems (`benchmarks.lib.libraries.workloads`), forward and
backward, and writes a line for every decision that a tuner makes on the way: what it chose, and the wall seconds of
the call that decided. Every arm is a fresh process with an empty store and an empty Triton cache. `harvest` measures
everything, and leaves a table of it without source or IR text; it is the arm `exhaustive` on all cores.

The arms of `pick`: `forecast` (this project's default), `exhaustive` (its mode that measures everything), `triton`
(`triton.autotune`, on a sample of contexts; `--sample SECONDS` gives other arms the same one), `before` (as
`forecast`, by the packages of another checkout, `--before FOLDER`, which any other stage may take, too), and `floor`
(the harvest's winner alone: compiled, launched and timed once). `triton`, `floor` and samples read the harvest.
`retime` times the choices of all arms whose files lie in
FOLDER, with the harvest's best three, side by side; on the machine of the harvest it finds their binaries.

`report` joins what the stages left in some folders into a result file; of several rows of an arm and a context that of
the last folder counts, and the share of pairs of folders that chose the same config is the arm's agreement. `pack`
joins the harvests' tables, a row per candidate. Both need no device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.lib.environment import ROOT
from benchmarks.lib.libraries.contexts import ENVIRONMENT, ContextId, by_context, config_key, read_rows
from benchmarks.lib.libraries.installation import install_libraries, library_environment
from benchmarks.lib.processes.child_processes import child_environment, copy_missing
from benchmarks.lib.result_files import ResultFile, say
from forecast_autotune.features.traced_texts import collect_facts
from forecast_autotune.records import Candidate, Measurement
from forecast_autotune.records.problem import FACTS
from forecast_autotune.records.table import Table, read_tables, write_tables
from forecast_autotune.store import Store
from forecast_train.metrics import cluster_bootstrap

LONGEST_READING_S = 20.0
"""For the IR of one problem; IR not read by then has no facts."""
TEXT_SIZES = "text_sizes"
"""Key of a problem line: lines and characters of its IR by assignment, which compile seconds go by."""
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


def agreements(folders: Sequence[Path]) -> Figures:
    """By arm that several folders hold: the share of pairs of them that chose alike, in contexts that all decided."""
    result: Figures = {}
    runs = [{arm: rows for arm, rows in read_arms([folder]).items() if arm != RETIME} for folder in folders]
    for arm in sorted({arm for run in runs for arm in run}):
        chosen = [{c: config_key(row["config"]) for c, row in run[arm].items()} for run in runs if arm in run]
        common = sorted(set.intersection(*map(set, chosen)))
        if len(chosen) > 1 and common:
            alike = np.array(
                [[a[c] == b[c] for a, b in itertools.combinations(chosen, 2)] for c in common]
            ).mean(axis=1)
            counts = {"runs": len(chosen), "contexts": len(common), "always": int((alike == 1).sum())}
            share = _interval("share", lambda rows, alike=alike: float(alike[rows].mean()), common)
            result[arm] = counts | share
    return result


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


ARMS = ("forecast", "exhaustive", "triton", "before", "floor")
MODES = {"exhaustive": "exhaustive", "harvest": "exhaustive"}
JOINING = ("report", "pack")
UNSERVED = ("triton", "floor", "retime")
GRACE_S = 60.0
"""A workload that started in time may take this much longer."""


def main() -> None:
    """Run one stage."""
    a = _arguments()
    if a.stage in JOINING:
        report(a) if a.stage == "report" else say(f"table: {pack_tables(a.folders, a.out)} measurements")
        return
    a.out.mkdir(parents=True, exist_ok=True)
    scratch = a.scratch or Path(tempfile.gettempdir()) / "library-benchmark"
    scratch.mkdir(parents=True, exist_ok=True)
    site = install_libraries(scratch / "site", a.wheels)
    if a.stage == "harvest":
        home = run_arm(a, "harvest", scratch, site)
        tables = list(Store(home / "store").tables(None, None))
        if a.keep_texts is not None:
            write_tables(a.keep_texts, tables)
        count = write_text_free(tables, a.out / "harvest_table.jsonl.gz", len(os.sched_getaffinity(0)))
        say(f"table: {count} measurements of {len(tables)} problems")
    else:
        run_arm(a, "retime" if a.stage == "retime" else a.arm, scratch, site)


def _arguments() -> Namespace:
    command_line = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command_line.add_argument("stage", choices=("harvest", "pick", "retime", *JOINING))
    command_line.add_argument(
        "--out", type=Path, required=True, help="the folder of all stages' files, or the file"
    )
    command_line.add_argument(
        "--folders", type=Path, nargs="+", default=[], help="report, pack: folders of stages"
    )
    command_line.add_argument("--arm", choices=ARMS, default="forecast")
    command_line.add_argument("--wheels", type=Path, help="a folder of wheels, for a machine without network")
    command_line.add_argument(
        "--before", type=Path, help="a checkout of this project, whose packages this stage takes"
    )
    command_line.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="workloads, or how they begin"
    )
    command_line.add_argument(
        "--seconds", type=float, default=480.0, help="no workload starts later than this"
    )
    command_line.add_argument(
        "--workers", type=int, default=0, help="compilations at a time (default: one a core)"
    )
    command_line.add_argument(
        "--cores", type=int, default=0, help="cores that the arm may use (default: all)"
    )
    command_line.add_argument(
        "--sample",
        type=float,
        default=0.0,
        help="decide a lot of contexts that takes `triton.autotune` so many s",
    )
    command_line.add_argument("--seed", type=int, default=0, help="of that sample")
    command_line.add_argument("--rounds", type=int, default=15, help="retime: launches of each config")
    command_line.add_argument(
        "--keep-texts", type=Path, help="harvest: a private table file with source and IR, too"
    )
    command_line.add_argument(
        "--scratch", type=Path, help="where stores and caches go (default: a temporary folder)"
    )
    a = command_line.parse_args()
    if a.stage == "pick" and a.arm == "before" and a.before is None:
        command_line.error("--arm before needs --before FOLDER, a checkout to compare with")
    unserved = a.stage == "pick" and a.arm in UNSERVED
    if (a.sample or unserved) and not (a.out / "harvest.jsonl").is_file():
        needs = f"--arm {a.arm}" if unserved else "--sample"
        command_line.error(f"{needs} needs harvest.jsonl in {a.out}: run the stage harvest first")
    if a.stage in JOINING and not a.folders:
        command_line.error(f"{a.stage} needs --folders FOLDER..., the --out of other stages")
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
    result.finish(compare_arms(arms) | {"agreement": agreements(a.folders)})


def run_arm(a: Namespace, arm: str, scratch: Path, site: Path) -> Path:
    """Run all workloads in a fresh process as one arm; returns the folder of its store and its cache."""
    cores = sorted(os.sched_getaffinity(0))
    name = arm if not a.cores or a.cores >= len(cores) else f"{arm}_{a.cores}cores"
    home = (scratch / name).absolute()
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    out = a.out / f"{name}.jsonl"
    out.unlink(missing_ok=True)
    given: dict[str, Any] = {"arm": arm, "out": str(out.absolute()), "seconds": a.seconds, "only": a.only}
    if (a.out / "harvest.jsonl").is_file() and arm != "harvest":
        given["harvest"] = str((a.out / "harvest.jsonl").absolute())
    if sample := a.sample or (0.8 * a.seconds if arm == "triton" else 0.0):
        harvested = by_context(read_rows(a.out / "harvest.jsonl"))
        given["contexts"] = affordable_sample(harvested, sample, a.seed)
    if arm == "retime":
        picks = {path.stem: str(path.absolute()) for path in sorted(a.out.glob("*.jsonl")) if path != out}
        given |= {"picks": picks, "rounds": a.rounds}
        join_caches(scratch, home / "triton")
    environment = arm_environment(a, arm, home, site)
    command = [sys.executable]
    if arm not in UNSERVED:
        command += ["-m", "forecast_autotune", "run"]
    command += ["-m", "benchmarks.lib.libraries.watching", json.dumps(given)]
    begin = time.perf_counter()
    allowed = cores[: a.cores] if a.cores else cores
    child = subprocess.Popen(
        command,
        env=environment,
        cwd=home,
        start_new_session=True,
        preexec_fn=lambda: os.sched_setaffinity(0, allowed),
    )
    try:
        child.wait(a.seconds + GRACE_S)
    except subprocess.TimeoutExpired:
        say(f"{name}: given up after {a.seconds + GRACE_S:.0f} s")
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    rows = list(read_rows(out))
    walls = sum(row.get("wall_s", 0.0) for row in rows)  # stage retime writes times, and decides nothing
    say(f"{name}: {len(rows)} rows of {walls:.1f} s, {time.perf_counter() - begin:.0f} s with all else")
    return home


def join_caches(scratch: Path, to: Path) -> None:
    """Copy what the arms have compiled on this machine into one Triton cache."""
    for cache in sorted(scratch.glob("*/triton")):
        if cache != to:
            shutil.copytree(cache, to, copy_function=copy_missing, dirs_exist_ok=True)


def arm_environment(a: Namespace, arm: str, home: Path, site: Path) -> dict[str, str]:
    """The environment of an arm's process: empty caches, the libraries, and the packages it is to import."""
    checkouts = [ROOT] if a.before is None else [a.before.absolute(), ROOT]
    more = library_environment(site, home, checkouts)
    if arm in MODES:
        more["FORECAST_AUTOTUNE_MODE"] = MODES[arm]
    if a.workers and arm not in UNSERVED:
        more["FORECAST_AUTOTUNE_WORKERS"] = str(a.workers)
    return child_environment(home, **more)


TIMING_S = 0.15
"""Seconds, about, in which `triton.autotune` times a config."""


def affordable_sample(harvested: Mapping[str, Mapping[str, Any]], seconds: float, seed: int) -> list[str]:
    """Contexts by lot, as many as one after the other fit into so many seconds without this project.

    A context's seconds are those of its compilations in the harvest, and of as many timings.
    """
    names = sorted(harvested)
    random.Random(seed).shuffle(names)
    chosen: list[str] = []
    for name in names:
        row = harvested[name]
        seconds -= float((row.get("cost") or {}).get("compile_s", 0.0)) + TIMING_S * row["n"]
        if seconds < 0:
            break
        chosen.append(name)
    return chosen


if __name__ == "__main__":
    main()
