"""Measure kernels exhaustively on every GPU of this machine and write table files.

    python -m benchmarks.corpus.harvest_kernels --out DIRECTORY [--only matmul,softmax] [--seconds 500]

Compilation is the bottleneck, so all cores compile at once, kernel by kernel, each config once for all
shapes of one kind (forked children; a hung compiler costs only its child), while one lane per GPU times
the kernels that are compiled. Every problem's winner is checked against the kernel's reference.
Resumable: measurements lie in a store below the output directory the moment they exist, binaries in
Triton's cache, and a second run goes on where the first stopped. Each finished kernel is appended to the
table file of its lane at once, so a run cut short leaves whole kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks import kernels
from benchmarks.lib.environment import environment
from benchmarks.lib.processes.child_processes import module_command
from benchmarks.lib.processes.harvest_worker import (
    AFTER_VARIABLE,
    COMPILE_TIMEOUT_S,
    EACH_VARIABLE,
    SHAPES_VARIABLE,
    harvested_cases,
    harvested_configs,
    run_worker,
)
from benchmarks.lib.result_files import say
from forecast_autotune.records import Candidate, Outcome, Problem, digest
from forecast_integrations.triton.compile.pool import ForkPool, without_device
from forecast_integrations.triton.null_device import null_device
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.source import innermost


def problem_of_case(case: kernels.Case) -> tuple[Problem, dict[str, Any]]:
    """The problem record of a case on the null device, and its arguments by name."""
    data = case.make("meta")
    named = {**dict(zip(case.kernel.arg_names, data["args"], strict=False)), **data["kwargs"]}
    record = describe.kernel_record(case.kernel)
    key = tuple(str(named[name]) for name in case.key)
    return describe.describe(case.kernel, record, named, key, data["grid"]), named


def binary_digests(case: kernels.Case) -> list[str]:
    """Return what each config's binary depends on: a digest that other shapes may share."""
    problem, named = problem_of_case(case)
    kind = describe.call_kind(problem, innermost(case.kernel))
    computed = describe.heuristic_values(case.kernel)
    results = []
    for config in harvested_configs(case):
        values = computed({**named, **config.all_kwargs()})
        added = {k: v for k, v in values.items() if k not in named}
        results.append(digest(kind, str(config), sorted((k, repr(v)) for k, v in added.items())))
    return results


PATIENCE = 3
"""Fresh lanes that a kernel may cost before it is left."""


@dataclass
class KernelProgress:
    """One kernel on its way: what is still compiling, and what hung."""

    kernel: str
    waiting: int = 0
    hung: dict[str, list[int]] = field(default_factory=dict)
    tries: int = 0


class KernelHarvest:
    """Compiles on all cores, hands compiled kernels to lanes, keeps what they report."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.begin = time.perf_counter()
        self.ready: queue.Queue[KernelProgress | None] = queue.Queue()
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.compiled: list[dict[str, Any]] = []
        self.ok = 0
        self.lock = threading.Lock()

    def run(self) -> int:
        """All kernels; returns the exit status."""
        a = self.arguments
        gpus = 1 if a.null else max(1, torch.cuda.device_count())
        threads = [threading.Thread(target=self._lane, args=(i,), daemon=True) for i in range(gpus)]
        for thread in threads:
            thread.start()
        try:
            self._compile()
        finally:
            for _ in threads:
                self.ready.put(None)
        for thread in threads:
            thread.join()
        self.write()
        say(f"{self.ok} ok measurements of {len(self.rows)} problems, {len(self.failed)} failed")
        return 1 if self.failed else 0

    def late(self) -> bool:
        """Whether no further kernel should be begun."""
        return time.perf_counter() - self.begin > float(self.arguments.seconds)

    def write(self) -> None:
        """The report so far."""
        report = {
            "environment": environment(),
            "ok": self.ok,
            "seconds": round(time.perf_counter() - self.begin, 1),
            "cases": self.rows,
            "failed": self.failed,
            "compiled": self.compiled,
        }
        (self.arguments.out / "harvest.json").write_text(json.dumps(report, indent=1) + "\n")

    def _compile(self) -> None:
        """Compile kernel by kernel, at most one after the other but always on all cores."""
        prefixes = tuple(p for p in self.arguments.only.split(",") if p)
        skipped = tuple(p for p in self.arguments.skip.split(",") if p)
        chosen = [c for c in kernels.every() if not prefixes or c.name.startswith(prefixes)]
        chosen = [c for c in chosen if not skipped or not c.name.startswith(skipped)]
        # In an order that mixes families and hands: a run cut short leaves a bit of each.
        names = sorted({c.name.partition("/")[0] for c in chosen}, key=digest)
        with null_device():
            tasks: dict[str, tuple[kernels.Case, int]] = {}
            pool = ForkPool(
                without_device(lambda tag: compile_one(*tasks[cast("str", tag)])),
                self.arguments.workers,
                COMPILE_TIMEOUT_S,
            )
            works: dict[str, KernelProgress] = {}
            same: dict[str, list[tuple[str, int]]] = {}
            for name in names:
                work = works[name] = KernelProgress(name)
                first: dict[str, str] = {}
                for case in harvested_cases(name):
                    try:
                        result = binary_digests(case)
                    except Exception as error:
                        self.failed.append(f"{case.name}: no description: {error!r}"[:400])
                        continue
                    for i, binary in enumerate(result):
                        leader = first.setdefault(binary, f"{case.name} {i}")
                        same.setdefault(leader, []).append((case.name, i))
                        if leader not in tasks:
                            tasks[leader] = (case, i)
                            work.waiting += 1
            pool.schedule(cast("list[Candidate]", list(tasks)))
            say(f"{len(names)} kernels, {len(tasks)} binaries on {self.arguments.workers} cores")
            begin = time.perf_counter()
            for count in range(1, len(tasks) + 1):
                if self.late():
                    self.failed.append("compilation was cut short")
                    break
                done = pool.next()
                assert done is not None  # it waits for as long as it takes
                case, _ = tasks[cast("str", done.candidate)]
                work = works[case.name.partition("/")[0]]
                work.waiting -= 1
                if done.outcome is Outcome.TIMEOUT:
                    for name, i in same[cast("str", done.candidate)]:
                        work.hung.setdefault(name, []).append(i)
                elif done.error is not None or done.outcome not in (None, Outcome.COMPILE_ERROR):
                    self.failed.append(
                        f"{done.candidate}: {done.outcome} {done.message} {done.error!r}"[:400]
                    )
                if done.outcome is not None:
                    self.compiled.append({"binary": done.candidate, "message": done.message[:160]})
                if work.waiting == 0:
                    self.ready.put(work)
                if count % 100 == 0:
                    rate = count / (time.perf_counter() - begin)
                    say(f"compiled {count} of {len(tasks)}, {rate:.1f} a second; {self.ok} measurements")
            pool.close()

    def _lane(self, index: int) -> None:
        process: subprocess.Popen[str] | None = None
        while (work := self.ready.get()) is not None:
            if self.late():
                self.failed.append(f"{work.kernel}: no time left")
                continue
            if process is None:
                process = self._start(index)
            if self._serve(process, work):
                continue
            process.kill()
            process = None
            work.tries += 1
            if work.tries < PATIENCE:
                self.ready.put(work)
                # The end may have been announced already: what comes after it must not be lost.
                if self.ready.queue[0] is None:
                    self.ready.put(self.ready.get())
            else:
                self.failed.append(f"{work.kernel}: left after {PATIENCE} lanes")
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.wait(30)

    def _start(self, index: int) -> subprocess.Popen[str]:
        a = self.arguments
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": str(index),
            "FORECAST_AUTOTUNE_WORKERS": str(a.lane_workers),
            "FORECAST_AUTOTUNE_TIMEOUT": str(COMPILE_TIMEOUT_S),
            "FORECAST_AUTOTUNE_SUMMARY": "0",
        }
        command = [*module_command(__file__), "--out", str(a.out), "--lane", str(index)]
        command += ["--null"] if a.null else []
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def _serve(self, process: subprocess.Popen[str], work: KernelProgress) -> bool:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"kernel": work.kernel, "hung": work.hung}) + "\n")
            process.stdin.flush()
        except OSError:
            return False
        for line in process.stdout:
            try:
                row = json.loads(line)
            except ValueError:
                say(line.rstrip()[:300])
                continue
            if row.get("done") == work.kernel:
                return True
            if "case" not in row:
                continue
            with self.lock:
                if "failed" in row:
                    self.failed.append(f"{row['case']}: {row['failed']}")
                    say(f"FAILED {self.failed[-1][:400]}")
                else:
                    self.rows.append(row)
                    self.ok += row["ok"]
                if len(self.rows) % 25 == 0:
                    self.write()
                    say(f"{self.ok} measurements of {len(self.rows)} problems; last {row['case']}")
        return False


def compile_one(case: kernels.Case, index: int) -> None:
    """Compile one config for sm_90 into Triton's cache; in a child, without a device."""
    data = case.make("meta")
    config = harvested_configs(case)[index]
    case.kernel.warmup(*data["args"], grid=(1,), **data["kwargs"], **config.all_kwargs())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--store", type=Path, help="where the raw measurements lie (default: OUT/store)")
    parser.add_argument("--only", default="", help="comma-separated prefixes of case names")
    parser.add_argument("--skip", default="", help="prefixes of case names that are left out")
    parser.add_argument("--each", type=int, help="time at most so many configs of a case (default: all)")
    parser.add_argument("--after", type=int, help="leave out the first so many of those: timed before")
    parser.add_argument("--shapes", type=int, help="time at most so many cases of a kernel (default: all)")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no kernel after this many seconds")
    parser.add_argument("--workers", type=int, default=cores, help="compilations at a time (default: cores)")
    parser.add_argument("--lane-workers", type=int, default=3, help="children that a lane may have")
    parser.add_argument("--null", action="store_true", help="dry run without a GPU; its times are invented")
    parser.add_argument("--lane", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.lane is not None:
        store = arguments.store or Path(os.environ.get("HARVEST_STORE", arguments.out / "store"))
        return run_worker(store, arguments.out / f"tables-{arguments.lane}.jsonl.gz", arguments.null)
    # Lanes and compiling children read them there.
    thinning = (
        (EACH_VARIABLE, arguments.each),
        (AFTER_VARIABLE, arguments.after),
        (SHAPES_VARIABLE, arguments.shapes),
    )
    os.environ.update({name: str(value) for name, value in thinning if value})
    if arguments.store:
        os.environ["HARVEST_STORE"] = str(arguments.store)
    if not arguments.null and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --null makes a dry run")
    return KernelHarvest(arguments).run()


if __name__ == "__main__":
    sys.exit(main())
