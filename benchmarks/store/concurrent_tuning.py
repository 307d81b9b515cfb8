"""Claim: processes that start together on one problem measure nothing twice, lose nothing and agree.

    python -m benchmarks.store.concurrent_tuning --out benchmarks/results/concurrent_tuning.json

Sixteen processes import everything, bring up the same GPU, wait for each other, and call the same
matmul with the same 24 configs and one shared store at once. Then the store is read: how often each
(candidate, protocol) is in it, whether it holds exactly as many measurements as the processes say
they made, whether they chose the same config, and whether every line of its log is a whole record.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import kernels
from benchmarks.lib import devices, kernel_timing, result_files
from benchmarks.lib.processes import child_processes
from forecast_autotune import autotune
from forecast_autotune.records.json_fields import MALFORMED
from forecast_autotune.store import Store
from forecast_autotune.store.log import decode

CASE = "matmul/2048x2048x2048"
READY_S, DONE_S = 240.0, 240.0


def tune(given: dict[str, Any], null: bool) -> dict[str, Any]:
    """The child: get ready, wait for the word, call once."""
    (case,) = kernels.cases([CASE])
    with devices.device(null) as where:
        data = case.make(where)
        devices.warm_up_device(where)
        tuner = autotune(kernels.configs(case)[:: given["every"]], list(case.key))(case.kernel)
        print("ready", flush=True)
        sys.stdin.readline()
        result: dict[str, Any] = kernel_timing.tuned_call(case, tuner, data, lambda: None)
        result["correct"] = kernel_timing.check_output(case, data, where)
    return result


def run_together(a: Namespace, every: int, env: dict[str, str]) -> tuple[list[dict[str, Any]], float]:
    """Start all, release them at once; returns their results and the wall seconds until the last was done."""
    command = child_processes.child_command(__file__, a, "tune", {"every": every})
    children = [
        subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(a.processes)
    ]
    # A killed child closes its output, so none of the reads below can wait for ever.
    watchdog = threading.Timer(READY_S, kill_children, [children])
    watchdog.start()
    try:
        for child in children:
            assert child.stdout is not None
            if child.stdout.readline().strip() != "ready":
                raise RuntimeError(f"a process was not ready within {READY_S:g} s; see its message above")
        watchdog.cancel()
        result_files.say(f"{len(children)} processes are ready")
        begin = time.perf_counter()
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        texts = [child.communicate(timeout=DONE_S)[0] for child in children]
        wall = time.perf_counter() - begin
        if failed := [child.returncode for child in children if child.returncode]:
            raise RuntimeError(f"{len(failed)} processes failed with exit status {failed}")
        return [child_processes.last_object(text) for text in texts], wall
    finally:
        watchdog.cancel()
        kill_children(children)
        for child in children:
            child.wait()


def kill_children(children: list[subprocess.Popen[str]]) -> None:
    """End all children that still run."""
    for child in children:
        child.kill()


def torn_lines(store: Path) -> int:
    """Lines of the logs that are not whole JSON objects."""
    count = 0
    for log in store.rglob("log-*.jsonl"):
        for raw in log.read_bytes().split(b"\n"):
            try:
                if raw:
                    decode(raw)
            except MALFORMED:
                count += 1
    return count


def audit_store(folder: Path, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare what the processes say with what is in the store."""
    store = Store(folder)
    tables = list(store.tables())
    held = [m for table in tables for m in table.measurements]
    times = Counter((m.problem, m.candidate, m.protocol) for m in held)
    claimed = sum(r["decision"]["measured"] for r in results)
    single = sum(not m.in_turns for m in held)
    return {
        "problems": len(tables),
        "measurements": len(held),
        "measured_twice": sum(n > 1 for n in times.values()),
        "claimed": claimed,
        "lost": claimed - single,
        "tuned_by": sum(r["decision"]["measured"] > 0 for r in results),
        "configs_chosen": len({kernel_timing.config_text(r["winner"]) for r in results}),
        "torn_lines": torn_lines(folder),
        "notes": list(store.issued_warnings),
    }


def main() -> int:
    parser = result_files.parser(__doc__)
    parser.add_argument("--processes", type=int, default=16)
    a = result_files.parse_arguments(parser)
    if a.child:
        print(json.dumps(tune(a.given, a.null)), flush=True)
        return 0
    report = result_files.ResultFile(a, "concurrent_tuning")
    with tempfile.TemporaryDirectory(prefix="concurrent-", ignore_cleanup_errors=True) as folder:
        results, wall = run_together(a, 18 if a.null else 3, child_processes.child_environment(Path(folder)))
        for result in results:
            report.add("process", result)
        found = audit_store(Path(folder) / "store", results)
    seconds = sorted(r["seconds"] for r in results)
    report.finish(
        {
            "processes": len(results),
            **found,
            "fastest_call_s": round(seconds[0], 3),
            "slowest_call_s": round(seconds[-1], 3),
            "wall_s": round(wall, 3),
        }
    )
    good = found["problems"] == 1 and found["configs_chosen"] == 1
    return int(not good or any(found[name] for name in ("measured_twice", "lost", "torn_lines", "notes")))


if __name__ == "__main__":
    sys.exit(main())
