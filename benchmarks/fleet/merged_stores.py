"""Claim: stores that many processes write to and merge at random hold the union of what was written, and no more.

    python -m benchmarks.fleet.merged_stores --out benchmarks/results/merged_stores.json

CPU only; needs redis-server. Twenty processes write measurements and decisions to two stores on disk and merge the
two and a Redis server into each other, in random directions and at random moments, a thousand times in total; now
and then one compacts a store. Afterwards each is merged into the others once more. Then all three must hold every
row that any process was told is safe, none that nobody wrote, each once, and the same decisions.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import host_environment
from benchmarks.lib.fleet.servers import redis_server
from benchmarks.lib.fleet.stored_rows import decision, measurement, problem, row
from benchmarks.lib.result_files import write_result
from forecast_autotune.errors import StoreError
from forecast_autotune.store import Store
from forecast_autotune.store.merging.compaction import compact
from forecast_autotune.store.merging.merge import merge, row_digests
from forecast_autotune.store.merging.row_stores import RowTarget, StoreFolder
from forecast_autotune.store.remote.backends import remote_rows

PROBLEMS = 64


def places(folder: Path, address: str) -> list[RowTarget]:
    return [StoreFolder(folder / "a"), StoreFolder(folder / "b"), remote_rows(address)]


def work(folder: Path, address: str, number: int, merges: int, seed: int) -> dict[str, Any]:
    """One process: what it wrote, by digest, and what it did."""
    chance = random.Random(seed * 1000 + number)
    written: list[str] = []
    counts: Counter[str] = Counter()
    stores = [Store(folder / name) for name in "ab"]
    for step in range(merges):
        for _ in range(chance.randrange(3)):
            store, p = chance.choice(stores), problem(chance.randrange(PROBLEMS))
            at = f"2026-01-01T{number:02}:{step % 60:02}:{chance.randrange(60):02}+00:00"
            m = measurement(p, chance.randrange(10**9), at)
            store.add(p, m)
            written.append(row(m).digest)
            if chance.random() < 0.2:
                store.put_decision(p, decision(p, m))
                counts["decisions"] += 1
        source, into = chance.sample(places(folder, address), 2)
        try:
            merge([source], into)
            counts["merges"] += 1
            if chance.random() < 0.05:
                compact(StoreFolder(folder / chance.choice("ab")))
                counts["compactions"] += 1
        except StoreError as error:
            counts["errors"] += 1
            print(f"process {number}: {error}", file=sys.stderr)
    return {"written": written, "counts": dict(counts)}


def in_children(folder: Path, address: str, processes: int, merges: int, seed: int) -> list[dict[str, Any]]:
    """Fork the processes, and read what each of them did."""
    children = []
    for number in range(processes):
        share = merges // processes + (number < merges % processes)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                done = work(folder, address, number, share, seed)
                (folder / f"done-{number}.json").write_text(json.dumps(done))
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    failed = [pid for pid in children if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]
    if failed:
        raise RuntimeError(f"{len(failed)} processes failed")
    return [json.loads((folder / f"done-{n}.json").read_text()) for n in range(processes)]


def measurement_digests(store: RowTarget) -> Counter[str]:
    return Counter(d for k in store.kernels() for d in store.rows(k).measurements)


def decisions(store: RowTarget) -> dict[str, str]:
    return {name: r.digest for k in store.kernels() for name, r in store.rows(k).decisions.items()}


def run(processes: int, merges: int, seed: int) -> dict[str, Any]:
    """One run; see the module."""
    with tempfile.TemporaryDirectory(prefix="merged-stores-") as name, redis_server(Path(name)) as address:
        folder, begin = Path(name), time.perf_counter()
        done = in_children(folder, address, processes, merges, seed)
        seconds = time.perf_counter() - begin
        a, b, shared = places(folder, address)
        for source, into in ((a, shared), (b, shared), (shared, a), (shared, b)):
            merge([source], into)
        written = {digest for entry in done for digest in entry["written"]}
        held = [set(measurement_digests(store)) for store in (a, b, shared)]
        counts: Counter[str] = sum((Counter(entry["counts"]) for entry in done), Counter())
        before = [row_digests(store) for store in (a, b, shared)]
        again = sum(merge([source], into).added for source in (a, b, shared) for into in (a, b, shared))
        after = [row_digests(store) for store in (a, b, shared)]
        listed = [
            len(found) - len(set(found))
            for store in (Store(folder / "a"), Store(folder / "b"))
            for found in (store.measurements(problem(n)) for n in range(PROBLEMS))
        ]
        return {
            "processes": processes,
            "merges": counts["merges"],
            "compactions": counts["compactions"],
            "rows": len(written),
            "decisions_made": counts["decisions"],
            "decided": len(decisions(a)),
            "seconds": round(seconds, 1),
            "errors": counts["errors"],
            "lost": sum(len(written - rows) for rows in held),
            "made_up": sum(len(rows - written) for rows in held),
            "counted_twice": sum(listed),
            "different_decisions": len({json.dumps(decisions(s), sort_keys=True) for s in (a, b, shared)})
            - 1,
            "changed_by_merging_again": again + sum(x != y for x, y in zip(before, after, strict=True)),
        }


BAD = ("errors", "lost", "made_up", "counted_twice", "different_decisions", "changed_by_merging_again")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--merges", type=int, default=1000, help="in total")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="the result file (JSON)")
    arguments = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(arguments.processes, arguments.merges, arguments.seed)
    result = {"claim": "merged_stores", "environment": host_environment(arguments.seed), "summary": found}
    print(json.dumps(result, indent=1))
    write_result(arguments.out, result)
    return int(any(found[name] for name in BAD))


if __name__ == "__main__":
    sys.exit(main())
