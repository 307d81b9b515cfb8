"""Claim: no damage to stores, imports, tables, decisions and recorded answers stops what a user does.

Each case is a function of the seed and its number: it damages one to three sound files (bits, numbers, texts,
nesting, lines, kinds of files) and then tunes, shows, explains, exports, imports, replays and clears. A fault is a
traceback, more than `--deadline` seconds of computing or of waiting, a peak beyond `--memory` MiB, a row lost that
was not touched, a status that does not fit what was said, and a config that nobody offered.

    python -m benchmarks.hardening.fuzz_records --cases 10000 --out benchmarks/results/fuzz_records.json
    python -m benchmarks.hardening.fuzz_records --only 4711
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.lib import result_files
from benchmarks.lib.environment import host_environment
from benchmarks.lib.processes.child_processes import module_command
from benchmarks.lib.processes.core_waits import waited_for_core_s

BATCH = 500
"""Cases of one child process."""
ADDRESS_SPACE = 12 << 30
"""Bytes; a case that asks for all memory there is must not take the machine along."""
PIPE_WAIT_S = 1.0
"""Seconds that a command waits for the other end of a pipe; none of those here has one."""
MAX_KEPT = 200
"""Faulty cases of which the result tells all; the others are counted."""


class CaseDeadline(BaseException):
    """The case at hand has taken too long; no handler of ordinary errors may take it for one."""


class CaseClock:
    """Ends a case that computes for too long, or waits for too long; how fast the machine is has no part in it."""

    TICK_S = 5.0
    IDLE_S = 0.02
    """Seconds of a tick in which a process runs, or is ready to, below which it waits for something else."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.expired, self.where = False, ""
        self._begin = self._last = self._waited = self._delayed = 0.0

    def begin(self) -> None:
        """A case begins."""
        self.expired, self.where = False, ""
        self._begin = self._last = time.process_time()
        self._waited, self._delayed = 0.0, waited_for_core_s()
        signal.setitimer(signal.ITIMER_REAL, self.TICK_S, self.TICK_S)

    def tick(self, number: int, frame: FrameType | None) -> None:
        """Look at the clocks. Raises `CaseDeadline`."""
        now = time.process_time()
        delayed = waited_for_core_s()
        idle = now - self._last + delayed - self._delayed < self.IDLE_S
        self._waited = self._waited + self.TICK_S if idle else 0.0
        self._last, self._delayed = now, delayed
        if max(now - self._begin, self._waited) >= self.deadline_s:
            self.expired = True
            stack = traceback.extract_stack(frame)[-4:]
            self.where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(stack))
            raise CaseDeadline


def peak_mib() -> float:
    """Most memory that this process has held since `forget_peak`."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def forget_peak() -> None:
    """Let the peak begin anew from what is held now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def run_batch(seed: int, numbers: list[int], deadline_s: float, memory_mib: float) -> None:
    """The child: print one JSON line per case."""
    from benchmarks.lib.hardening.damaged_records import RecordFuzzer
    from forecast_autotune import file_access
    from forecast_autotune.commands.console import grammar

    grammar.build = cache(grammar.build)  # the same each time, and slower than most of what is tried here
    file_access.PIPE_WAIT_S = PIPE_WAIT_S
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    said, sys.stdout = sys.stdout, sys.stderr  # nothing that a case prints may pass for a result

    clock = CaseClock(deadline_s)
    signal.signal(signal.SIGALRM, clock.tick)
    with tempfile.TemporaryDirectory(prefix="fuzz-records-") as folder:
        os.environ["FORECAST_AUTOTUNE_CACHE_DIR"] = str(Path(folder) / "own cache")
        fuzzer = RecordFuzzer(Path(folder), seed)
        for number in numbers:
            forget_peak()
            begin = time.process_time()
            clock.begin()
            try:
                case = asdict(fuzzer.run(number))
            except CaseDeadline:
                case = {"number": number, "faults": []}
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if clock.expired:
                case["faults"].append({"fault": "hang", "where": clock.where, "detail": ""})
            case |= {"seconds": round(time.process_time() - begin, 3), "peak_mib": round(peak_mib(), 1)}
            if case["peak_mib"] > memory_mib:
                case["faults"].append({"fault": "memory", "where": "", "detail": f"{case['peak_mib']} MiB"})
            print(json.dumps(case), file=said, flush=True)


def run_cases(a: argparse.Namespace, numbers: list[int]) -> Iterator[dict[str, Any]]:
    """Run one batch in children; whoever dies is replaced, and the case it died of told."""
    left = list(numbers)
    while left:
        command = [*module_command(__file__), "--child", ",".join(map(str, left)), "--seed", str(a.seed)]
        command += ["--deadline", str(a.deadline), "--memory", str(a.memory)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert child.stdout is not None
        stopper: threading.Timer | None = None
        try:
            while True:
                # The child watches itself; this is for one that cannot, on a machine that is busy.
                stopper = threading.Timer(20 * a.deadline + 600, child.kill)
                stopper.start()
                line = child.stdout.readline()
                stopper.cancel()
                if not line:
                    break
                case = json.loads(line)
                left.remove(case["number"])
                yield case
        finally:
            if stopper is not None:
                stopper.cancel()
            child.kill()
            child.communicate()
        if left:
            detail = f"exit {child.returncode}"
            yield {"number": left.pop(0), "faults": [{"fault": "died", "where": "child", "detail": detail}]}


def summary_of(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts over all cases, and the worst of each."""
    from benchmarks.lib.hardening.damaged_records import FAULTS

    counts = Counter(f["fault"] for case in cases for f in case["faults"])
    damage = Counter(d.partition(":")[0] for case in cases for d in case.get("damage", ()))
    return {
        "cases": len(cases),
        "faulty": sum(bool(case["faults"]) for case in cases),
        "faults": {name.replace(" ", "_"): counts.get(name, 0) for name in FAULTS},
        "peak_mib": max((case.get("peak_mib", 0.0) for case in cases), default=0.0),
        "most_cpu_s": max((case.get("seconds", 0.0) for case in cases), default=0.0),
        "kinds": dict(sorted(Counter(case.get("kind", "") for case in cases).items())),
        "damage": dict(sorted(damage.items())),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="child processes at a time")
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds a case may compute, or wait")
    parser.add_argument("--memory", type=float, default=1024.0, help="MiB that a case may hold at most")
    parser.add_argument("--only", type=int, help="run this case alone, and print what it found")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.child or a.only is not None:
        numbers = [a.only] if a.child is None else [int(n) for n in a.child.split(",")]
        run_batch(a.seed, numbers, a.deadline, a.memory)
        return 0
    batches = [list(range(i, min(i + BATCH, a.cases))) for i in range(0, a.cases, BATCH)]
    cases: list[dict[str, Any]] = []
    mutex = threading.Lock()

    def run_all(batch: list[int]) -> None:
        for case in run_cases(a, batch):
            with mutex:
                cases.append(case)
                if case["faults"]:
                    print(json.dumps(case), file=sys.stderr, flush=True)
                if len(cases) % 250 == 0:
                    print(f"{len(cases)} cases", file=sys.stderr, flush=True)
                    write_result(a, cases)  # so that a run cut short leaves what it had

    with ThreadPoolExecutor(a.jobs) as pool:
        list(pool.map(run_all, batches))
    write_result(a, cases)
    summary = summary_of(cases)
    print(json.dumps(summary, indent=1))
    return int(summary["faulty"] > 0)


def write_result(a: argparse.Namespace, cases: list[dict[str, Any]]) -> None:
    """Put the cases done so far into the result file, if there is to be one."""
    if a.out is None:
        return
    result = {
        "claim": "damaged records stop nothing",
        "environment": host_environment(a.seed),
        "options": {"cases": a.cases, "deadline_s": a.deadline, "memory_mib": a.memory},
        "summary": summary_of(cases),
        "faulty": sorted((c for c in cases if c["faults"]), key=lambda c: c["number"])[:MAX_KEPT],
    }
    result_files.write_result(a.out, result)


if __name__ == "__main__":
    sys.exit(main())
