"""Measure kernels exhaustively on the current GPU and write a table file.

    python benchmarks/harvest.py --out DIRECTORY [--only matmul,softmax] [--seconds 500]

Resumable: measurements lie in a store below the output directory the moment they exist, and a second
run goes on where the first stopped. Every kernel's output is checked against its reference first.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kernels
from benchmarks.report_environment import environment
from forecast_autotune import autotune
from forecast_autotune.records import Candidate
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.table import Table, write_tables
from forecast_integrations.describe import to_config


def harvest_case(case: kernels.Case, store: Store, device: str) -> dict[str, Any]:
    """Time all configs of one case; returns what it cost."""
    inputs = case.make(device)
    tuner = autotune(
        configs=kernels.configs(case),
        key=list(case.key),
        reset_to_zero=list(case.reset_to_zero),
        store=store,
        mode="exhaustive",
    )(case.kernel)
    begin = time.perf_counter()
    kernels.reset(case, inputs)
    tuner[inputs["grid"]](*inputs["args"], **inputs["kwargs"])
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    atol, rtol = case.tolerance
    for got, want in zip(inputs["outputs"], case.reference(inputs), strict=True):
        torch.testing.assert_close(got.float(), want.float(), atol=atol, rtol=rtol)
    decision = tuner.decision
    times = [t[0] for t in tuner.configs_timings.values()]
    ran = sorted(t for t in times if t != float("inf"))
    return {
        "case": case.name,
        "problem": decision.problem,
        "configs": len(times),
        "ok": len(ran),
        "best_ms": ran[0],
        "median_ms": ran[len(ran) // 2],
        "chosen": str(decision.chosen),
        "seconds": round(seconds, 2),
        "compile_s": round(decision.cost.compile_s, 2),
        "timing_s": round(decision.cost.timing_s, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--store", type=Path, help="where the raw measurements lie (default: OUT/store)")
    parser.add_argument("--only", default="", help="comma-separated prefixes of case names")
    parser.add_argument("--shard", default="0/1", help="i/n: take every n-th case from the i-th on")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after this many seconds")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    store = Store(arguments.store or arguments.out / "store")
    prefixes = tuple(p for p in arguments.only.split(",") if p)
    begin = time.perf_counter()
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    index, count = map(int, arguments.shard.split("/"))
    for case in kernels.cases()[index::count]:
        if prefixes and not case.name.startswith(prefixes):
            continue
        if time.perf_counter() - begin > arguments.seconds:
            failed.append(f"{case.name}: no time left")
            continue
        try:
            rows.append(harvest_case(case, store, "cuda"))
            print(json.dumps(rows[-1]), flush=True)
        except Exception as error:
            failed.append(f"{case.name}: {type(error).__name__}: {error}"[:600])
            print("FAILED", failed[-1], flush=True)
    names = {row["problem"]: row["case"] for row in rows}
    tables = [in_list_order(t, names[t.problem.id]) for t in store.tables() if t.problem.id in names]
    written = write_tables(arguments.out / f"tables-{index}.jsonl.gz", tables)
    print(f"{len(tables)} problems, {written} measurements", flush=True)
    report = {"environment": environment(), "cases": rows, "failed": failed}
    (arguments.out / f"harvest-{index}.json").write_text(json.dumps(report, indent=1))
    return 1 if failed else 0


def in_list_order(table: Table, label: str) -> Table:
    """A table named after its case, rows in the order of the case's config list.

    They were measured best forecast first; a baseline that takes "the first k" must not see that.
    """
    case = kernels.cases([label])[0]
    place = {Candidate(to_config(c)): i for i, c in enumerate(kernels.configs(case))}
    rows = sorted(table.measurements, key=lambda m: (place[m.candidate], m.at))
    noted = {"label": label, "compiled_at_once": Settings.from_environment().worker_count()}
    return Table(replace(table.problem, extra={**table.problem.extra, **noted}), rows)


if __name__ == "__main__":
    sys.exit(main())
