"""Claim: lanes that open together import torch and Triton once, and a lane that lost its server is back at once.

    python -m benchmarks.verification.lane_starts --out benchmarks/results/lane_starts_cpu.json \
        [--lanes 1 4 16] [--repeats 3]

For each number of lanes: seconds until all are open and processor seconds of all processes below this one, where they
share what is imported, and where each imports for itself (a variable of its own in its environment). Then a server is
killed, and the seconds are those until its lane does a job again. Needs no GPU.
"""

from __future__ import annotations

import os
import resource
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from forecast_harness.sandbox import canary
from forecast_harness.sandbox.api import JobStatus, SandboxJob, SandboxLane
from forecast_harness.verify.lane_modules import LANE_MODULES


def opened(count: int, shared: bool) -> dict[str, float]:
    """Seconds and processor seconds to open so many lanes at once, and seconds that one of them was lost for."""
    own = [{} if shared else {"LANE_NUMBER": str(n)} for n in range(count)]
    lanes = [SandboxLane(warm=LANE_MODULES, environment=one) for one in own]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(SandboxLane.__enter__, lanes))
    seconds = time.perf_counter() - began
    os.kill(lanes[0].server_pid, signal.SIGKILL)
    began = time.perf_counter()
    job = SandboxJob(f"{canary.__name__}:main", {"device": None})
    assert lanes[0].run(job).status is JobStatus.INFRA_ERROR
    assert lanes[0].run(job).status is JobStatus.OK
    back = time.perf_counter() - began
    servers = sum(_processor_seconds(one.server_pid) for one in lanes)
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(SandboxLane.close, lanes))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    imports = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "processor_seconds": imports + servers, "back_s": back}


def _processor_seconds(pid: int) -> float:
    """A server's own: it is no child of this process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(int(one) for one in fields[11:13]) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--lanes", nargs="+", type=int, default=[1, 4, 16])
    made.add_argument("--repeats", type=int, default=3)
    arguments = parse_arguments(made, on_host=True)
    result = ResultFile(arguments, "lanes that open together import once")
    summary: dict[str, dict[str, float]] = {}
    for count in arguments.lanes:
        for name, shared in (("shared", True), ("alone", False)):
            runs = [opened(count, shared) for _ in range(arguments.repeats)]
            for run in runs:
                result.add(f"{count} {name}", run)
            summary[f"{count} {name}"] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            say(f"{count} lanes, {name}: {summary[f'{count} {name}']}")
    result.finish(summary)


if __name__ == "__main__":
    main()
