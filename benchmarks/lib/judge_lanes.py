"""What measurements of lanes share: judges that keep a ledger, runs on lanes that are open and warm."""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import ROOT
from benchmarks.lib.result_files import say
from forecast_autotune.records import Outcome
from forecast_harness.search.history.events import ConfirmationJob, NodeJob
from forecast_harness.search.interfaces import LaneFailure, NodeJudge
from forecast_harness.search.lanes.local_lanes import LocalJudgePool
from forecast_harness.search.lanes.ray_lanes import load_ray
from forecast_harness.search.records import NodeResult

OPEN_S, STUCK_S = 180.0, 120.0
OBJECT_STORE_BYTES = 80 << 20
"""Bytes of each raylet's object store, the least that Ray allows."""


class LedgerJudge(NodeJudge):
    """A judge that notes when a judgement begins and ends, in a line each that is written at once."""

    def __init__(self, judge: NodeJudge, lane: str, folder: Path) -> None:
        """`lane` says which it is, `folder` is the one of the run."""
        self._judge, self._lane, self._file = judge, lane, folder / "ledger"

    def judge(self, job: NodeJob) -> NodeResult:
        self._note("begin", job)
        found = self._judge.judge(job)
        self._note("end", job)
        return found

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        return self._judge.confirm(confirm)

    def close(self) -> None:
        self._judge.close()

    def _note(self, what: str, job: NodeJob) -> None:
        said = {"what": what, "job": job.id, "lane": self._lane, "pid": os.getpid(), "at": time.time()}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(said) + "\n")


def read_ledger(folder: Path) -> list[dict[str, Any]]:
    """All lines so far."""
    file = folder / "ledger"
    return [json.loads(x) for x in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def counts_by_job(lines: Sequence[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """How often each job began and ended."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for line in lines:
        found[line["job"]][line["what"]] += 1
    return found


@contextmanager
def shared_run_folder() -> Iterator[Path]:
    """A folder in which candidates that are users of their own find their files."""
    with tempfile.TemporaryDirectory(prefix="search-lanes-") as place:
        Path(place).chmod(0o711)
        yield Path(place)


def wait_until_open(lanes: LocalJudgePool) -> None:
    """Until all lanes are open. Raises `RuntimeError` for one in quarantine, and `TimeoutError`."""
    end = time.monotonic() + OPEN_S
    while any(lane.state != "ready" for lane in lanes.lanes):
        if broken := [lane for lane in lanes.lanes if lane.state == "quarantined"]:
            raise RuntimeError(f"a lane does not open: {broken}")
        if time.monotonic() > end:
            raise TimeoutError(f"lanes do not open: {lanes.lanes}")
        time.sleep(0.05)


def time_jobs(
    open_lanes: Callable[[Path], LocalJudgePool], listed: Sequence[NodeJob], warm: Sequence[NodeJob] = ()
) -> dict[str, Any]:
    """Seconds from the first submission to the last result, once all lanes are open and warm.

    `warm`: a job per lane that is not counted; so what a lane does only once is not, either. A lane that does
    not open raises. A lane that is lost with a job opens again and costs the run that time, as it would a
    search; with more than a quarter of the jobs, it raises.
    """
    with shared_run_folder() as folder:
        lanes = open_lanes(folder)
        try:
            wait_until_open(lanes)
            _warm_lanes(lanes, warm, folder)
            wait_until_open(lanes)
            began, used = time.perf_counter(), time.process_time()
            found = _all_results([lanes.submit(job) for job in listed])
            seconds, used = time.perf_counter() - began, time.process_time() - used
        finally:
            lanes.close()
        wanted = {job.id for job in listed}
        lines = [line for line in read_ledger(folder) if line["job"] in wanted]
    judged_by = {line["job"]: line["lane"] for line in lines if line["what"] == "end"}
    lost = [str(f) for f in found if isinstance(f, LaneFailure)]
    judged = {job.id: f for job, f in zip(listed, found, strict=True) if isinstance(f, NodeResult)}
    results = list(judged.values())
    blocks = [r.facts["blocks"] for r in results if "blocks" in r.facts]
    return {
        "jobs": len(listed),
        "warm_jobs_before": len(warm),
        "seconds": seconds,
        "jobs_per_minute": 60 * len(results) / seconds,
        "jobs_per_minute_of_lanes_at_work": _work_rate(lines),
        "outcomes": dict(Counter(str(r.outcome) for r in results)),
        "not_right": {id_: r.feedback for id_, r in judged.items() if r.outcome is not Outcome.OK},
        "lost": lost,
        "judged_once": sum(c["end"] == 1 for c in counts_by_job(lines).values()),
        "job_seconds": statistics.median(r.wall_seconds for r in results),
        "in_sandbox_seconds": statistics.median(r.device_seconds for r in results),
        "supervisors_cpu_seconds": used,
        "blocks": statistics.median(blocks) if blocks else None,
        "jobs_of_each_lane": dict(sorted(Counter(judged_by.values()).items())),
        "devices": len({r.device for r in results}),
        "judged_by": judged_by,
    }


def _warm_lanes(lanes: LocalJudgePool, warm: Sequence[NodeJob], folder: Path) -> None:
    """Raises `RuntimeError` where no lane judges its job right, or a lane got none."""
    if not warm:
        return
    results = [r for r in _all_results([lanes.submit(job) for job in warm]) if isinstance(r, NodeResult)]
    if all(r.outcome is not Outcome.OK for r in results):
        raise RuntimeError(f"honest sources are not judged to be right: {[r.feedback for r in results]}")
    if len(reached := {line["lane"] for line in read_ledger(folder)}) < len(warm):
        raise RuntimeError(f"{len(warm)} jobs at once reached these lanes alone: {sorted(reached)}")


def _all_results(futures: Sequence[Future[NodeResult]]) -> list[NodeResult | LaneFailure]:
    """All results, in order; the first failure that is one too many raises at once, whichever job's it is."""
    left, lost = set(futures), 0
    while left:
        done, left = wait(left, STUCK_S, return_when="FIRST_COMPLETED")
        if not done:
            raise TimeoutError(f"no job ended for {STUCK_S:g} s; {len(left)} of {len(futures)} are not done")
        for failure in filter(None, (future.exception() for future in done)):
            lost += 1
            if not isinstance(failure, LaneFailure) or lost > len(futures) // 4:
                raise failure
            say(f"A LANE WAS LOST: {failure}")
    return [error if isinstance(error := f.exception(), LaneFailure) else f.result() for f in futures]


def _work_rate(lines: Sequence[Mapping[str, Any]]) -> float:
    """Sum over lanes of jobs per minute until each has ended its last: the others' rest is left out."""
    if not lines:
        return 0.0
    began = min(line["at"] for line in lines)
    ends: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        if line["what"] == "end":
            ends[line["lane"]].append(line["at"])
    return math.fsum(60 * len(each) / (max(each) - began) for each in ends.values())


@contextmanager
def ray_cluster(resources: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Any, list[Any]]]:
    """A Ray cluster on this machine, to which this process is connected, and its raylets, the head first."""
    from ray.cluster_utils import Cluster

    kept = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), kept]))
    made = Cluster()
    try:
        nodes = [made.add_node(object_store_memory=OBJECT_STORE_BYTES, **each) for each in resources]
        load_ray().init(address=made.address, log_to_driver=False, logging_level="ERROR")
        say(f"a Ray cluster of {len(nodes)} nodes is up")
        yield made, nodes
    finally:
        load_ray().shutdown()
        made.shutdown()
        if kept is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = kept
