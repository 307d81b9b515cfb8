"""Searches of `llm_written_sources` as processes: how they are started and ended, and what their logs say."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.processes import child_processes
from benchmarks.lib.result_files import say
from forecast_autotune.records import Outcome
from forecast_harness.search.history.log import read_log
from forecast_harness.search.history.state import SearchState, replay_events
from forecast_harness.search.records import NodeResult

ARMS = ("filtered", "unfiltered")
GRACE_S = 15.0
"""What a search may need after its time is up, or after an interruption, to write down what it has."""
LEAST_S = 30.0
"""A search is not begun for less."""
TEXTS = "texts.jsonl"
"""The server's log, in the folder of all runs."""


@dataclass(frozen=True)
class SearchRun:
    """One search."""

    problem: str
    arm: str

    @property
    def name(self) -> str:
        """Names its folder, and who asks the model."""
        return f"{Path(self.problem.rpartition(':')[2]).stem}-{self.arm}"


@dataclass
class RunningSearch:
    """A search at work."""

    run: SearchRun
    process: subprocess.Popen[bytes]
    begun: float
    until: float
    """When it is interrupted, if it has not ended by itself."""
    interrupted: bool = False


def command(run: SearchRun, a: Namespace, url: str, seconds: float, folder: Path) -> list[str]:
    """The search as a user would start it."""
    asked = f"{url}/{run.name}/v1?model={Path(a.model).name}&kind=chat&concurrency=64&attempts=2"
    filtered = run.arm == "filtered"
    how = {
        "gpu-budget": a.evaluations,
        "surrogate": a.surrogate if filtered else "none",
        "samples": a.samples if filtered else a.k,
        "k": a.k,
        "trials": a.trials,
        "seconds": round(seconds, 1),
        "device": a.device,
        "lanes": 1,
        "out": folder,
    }
    proposers = [] if a.alone else ["--proposer", "mechanical"]
    given = itertools.chain.from_iterable((f"--{name}", str(value)) for name, value in how.items())
    start = [sys.executable, "-m", "forecast_autotune", "search", run.problem, "--quiet"]
    return [*start, "--llm", asked, *proposers, *given]


def start(run: SearchRun, a: Namespace, url: str, seconds: float, work: Path) -> RunningSearch:
    """Begin a search that has so many seconds."""
    folder, now = work / run.name, time.monotonic()
    folder.mkdir(parents=True)
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command(run, a, url, seconds, folder / "search"),
            env=child_processes.child_environment(folder),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    say(f"{run.name}: begun, {seconds:.0f} s")
    return RunningSearch(run, process, now, now + seconds)


def run_searches(
    runs: Sequence[SearchRun], a: Namespace, url: str, until: float, work: Path
) -> Iterator[RunningSearch]:
    """Every run as it ends, `a.jobs` at a time, until then (by the monotonic clock).

    The time is divided among the rounds that it takes. Those for which too little is left are not begun.
    """
    waiting, going = list(runs), list[RunningSearch]()
    try:
        while waiting or going:
            while waiting and len(going) < a.jobs:
                rounds = math.ceil(len(waiting) / a.jobs)
                seconds = (until - time.monotonic()) / rounds - GRACE_S
                run = waiting.pop(0)
                if seconds < LEAST_S:
                    say(f"{run.name}: left out, there is no time")
                    continue
                going.append(start(run, a, url, seconds, work))
            time.sleep(0.2)
            for one in [one for one in going if has_ended(one)]:
                going.remove(one)
                yield one
    finally:
        for one in going:
            kill(one)


def has_ended(one: RunningSearch) -> bool:
    """Whether a search has ended; interrupts, and in the end kills, one that is late."""
    late = time.monotonic() - one.until
    if one.process.poll() is not None:
        return True
    if late > GRACE_S:
        kill(one)
        return True
    if late > 0 and not one.interrupted:
        one.interrupted = True
        one.process.send_signal(signal.SIGINT)
    return False


def kill(one: RunningSearch) -> None:
    """End a search at once; its log stands."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.process.pid, signal.SIGKILL)
    one.process.wait()


def read_run(run: SearchRun, work: Path) -> SearchState | None:
    """What a run's log says; None before its search has begun."""
    path = work / run.name / "search" / "log.jsonl"
    if not path.is_file():
        return None
    state = replay_events(read_log(path))
    return state if state.started is not None else None


def read_texts(work: Path) -> list[dict[str, Any]]:
    """The log of the model's server."""
    return [json.loads(line) for line in (work / TEXTS).read_text(encoding="utf-8").splitlines()]


def run_row(one: RunningSearch, said: Sequence[Mapping[str, Any]], work: Path) -> dict[str, Any]:
    """One run's result; `said` is the log of the model's server."""
    seconds = round(time.monotonic() - one.begun, 1)
    found: dict[str, Any] = {"problem": one.run.problem, "arm": one.run.arm, "wall_seconds": seconds}
    mine = [line for line in said if line["who"] == one.run.name]
    found["model"] = {
        "texts": len(mine),
        "prompt_tokens": sum(line["prompt_tokens"] for line in mine),
        "output_tokens": sum(line["output_tokens"] for line in mine),
        "model_seconds": round(covered_seconds([(line["begin"], line["end"]) for line in mine]), 1),
    }
    state = read_run(one.run, work)
    if state is None:
        output = (work / one.run.name / "output").read_text(encoding="utf-8", errors="replace")
        return {**found, "ended": f"not begun: {output.strip()[-500:]}", "speedup": None}
    by_model = {n.id for n in state.nodes.values() if n.arm.startswith("llm")}
    answers = state.answers.values()
    model = [a for a in answers if a.arm.startswith("llm")]
    found["model"] |= {
        "sources": sum(len(a.nodes) for a in model),
        **evaluation_stages([j for n, j in state.judged.items() if n in by_model]),
        "problems": Counter(a.problem[:200] for a in model if a.problem).most_common(4),
    }
    others = [j for n, j in state.judged.items() if n not in by_model and n not in state.seeds]
    rewrites = sum(len(a.nodes) for a in answers) - found["model"]["sources"]
    best = state.nodes[state.best]
    return {
        **found,
        "mechanical": {"sources": rewrites, **evaluation_stages(others)},
        "ended": "killed" if state.stopped is None else state.stopped.reason,
        "evaluations": state.spent.measurements,
        "batches": max(state.batches, default=0),
        "curve": [round(2**-point.best, 4) for point in state.history],
        "speedup": round(2**-state.best_score, 4),
        "evidence": state.evidence(best.id),
        "best": {"arm": best.arm, "config": dict(state.judged[best.id].config)} if state.judged else {},
        "spent_on": {name: round(spent.wall_seconds, 1) for name, spent in state.spent_on.items()},
    }


def evaluation_stages(listed: Sequence[NodeResult]) -> dict[str, Any]:
    """How far sources that were evaluated came."""
    return {
        "evaluated": len(listed),
        "compiled": sum(j.stage not in ("screen", "compile") for j in listed),
        "verified": sum(j.outcome is Outcome.OK for j in listed),
        "outcomes": dict(Counter(str(j.outcome) for j in listed)),
    }


def covered_seconds(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of the spans."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
