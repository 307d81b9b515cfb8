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
the last folder counts. `pack` joins the harvests' tables, a row per candidate. Both need no device.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import ROOT
from benchmarks.lib.libraries.contexts import ENVIRONMENT, by_context, read_rows
from benchmarks.lib.libraries.installation import install_libraries, library_environment
from benchmarks.lib.libraries.tables import pack_tables, write_text_free
from benchmarks.lib.processes.child_processes import child_environment, copy_missing
from benchmarks.lib.result_files import ResultFile, say
from forecast_autotune.records.table import write_tables
from forecast_autotune.store import Store

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
    from benchmarks.lib.libraries.comparison import compact_rows, compare_arms, read_arms

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
    result.finish(compare_arms(arms))


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
