"""Claim: on one budget, a search that forecasts a language model's sources finds a faster kernel than one
that measures each of them.

    python -m benchmarks.search.llm_written_sources --model FOLDER --out RESULT.json \
        [--problems softmax,layer_norm,swiglu] [--evaluations 16] [--jobs 6] \
        [--total-seconds 420] [--alone] [--device cpu|cuda] [--work DIR]

For every problem two searches by the real command line, side by side with those of other problems, with as
many evaluations each (a source that is verified, tuned and timed, whatever comes of it):

- `filtered` asks for `--samples` sources per parent, forecasts them, and evaluates at most `--k`;
- `unfiltered` asks for `--k` sources per parent and evaluates every one (`--surrogate none`).

Who proposes is a language model in one process for all (`model_server`), beside mechanical rewrites, or with
`--alone` nobody else. `--model` is a folder of safetensors (`convert_gguf` makes one of a GGUF file); its
options are `--temperature` and `--max-tokens`. The searches share a device: timings take turns by the lock
that they always take, but verifications and the model work meanwhile, so that times in the searches are
noisier than usual. In the end, with nothing else at work, the best source of each arm is verified and timed
again beside the seed, and beside the other arm's (`retime_best`); only that is compared. Ratios are of times,
more than 1 where the filtered search's source is faster.

Nothing is begun that cannot end within `--total-seconds` after the model is loaded: searches share seven
tenths of them, are told how long they may take, and are interrupted, with what they have, where they do not
end by themselves. A result is on disk as soon as a search ends; with `--work` all logs and texts are kept.

A run says, by arm: `read_texts` that the model wrote, second turns after a broken rule included; `sources`, what
of it could be read and was new in its request, and what mechanical rewrites gave; `evaluated`, `compiled` and
`verified` of these (the seed is one more evaluation); `speedup` against the seed, tuned alike, as its search
believes; tokens, and `model_seconds`: wall seconds with a text of it under way, those of waiting included.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.lib import result_files
from benchmarks.lib.result_files import say
from benchmarks.lib.search.llm_search_runs import (
    ARMS,
    TEXTS,
    SearchRun,
    covered_seconds,
    read_run,
    read_texts,
    run_row,
    run_searches,
)
from forecast_harness.search.history.events import ConfirmationJob
from forecast_harness.search.history.state import SearchState
from forecast_harness.search.interfaces import LaneFailure
from forecast_harness.search.judging.factory import open_judge
from forecast_harness.search.records import Node, NodeResult

LOADING_S = 240.0
"""Most seconds until the model has written its first text."""
RETIMING = 0.3
"""Share of the total that is kept for timing the best again."""
RETIMED_S = 40.0
"""What that takes per problem: fresh processes, verification, and two contests; learnt from the first."""


def retime_best(
    states: Mapping[str, SearchState], device: str, seconds: float, folder: Path
) -> dict[str, Any]:
    """The best of both arms verified afresh and timed beside the seed, and beside each other."""
    first, other = states["filtered"], states["unfiltered"]
    best = {arm: state.nodes[state.best] for arm, state in states.items()}
    seed = first.nodes[first.seeds[0]]
    configs = {seed.id: first.judged[seed.id].config}
    configs |= {node.id: states[arm].judged[node.id].config for arm, node in best.items()}
    mine, theirs = best["filtered"], best["unfiltered"]
    assert first.target.id == other.target.id
    found: dict[str, Any] = {}
    with closing(open_judge(first.target, device=device, folder=folder)) as judge:

        def beside(nodes: Sequence[Node], rival: Node) -> Mapping[str, NodeResult]:
            left = {n.id: n for n in nodes if n.id != rival.id}
            asked = ConfirmationJob(tuple(left.values()), configs, rival, first.target, seconds / 2)
            return judge.confirm(asked) if left else {}

        against_seed = beside([mine, theirs], seed)
        for arm, node in best.items():
            found[arm] = contest_summary(against_seed.get(node.id), node.id == seed.id)
        direct = against_seed if theirs.id == seed.id else beside([mine], theirs)
        found["each_other"] = contest_summary(direct.get(mine.id), mine.id == theirs.id)
    return found


def contest_summary(judged: NodeResult | None, same: bool) -> dict[str, Any]:
    """How much faster a source is than its rival; `ratio` is null where it was refused, or not timed."""
    if same:
        return {"ratio": 1.0, "standing": "the same source"}
    if judged is None:
        return {"ratio": None, "standing": "not timed"}
    if judged.log2_ratio is None:
        return {"ratio": None, "standing": "refused", "feedback": judged.feedback[:300]}
    return {
        "ratio": round(2**-judged.log2_ratio, 4),
        "standard_error": round(judged.sd * math.log(2), 4),
        "standing": judged.facts.get("standing", judged.evidence),
        "interval": judged.facts.get("interval"),
    }


def summary(rows: Sequence[Mapping[str, Any]], again: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The claim's figures; `again` are the problems that were timed again."""
    direct = {name: found["each_other"]["ratio"] for name, found in again.items()}
    ratios = [ratio for ratio in direct.values() if ratio]
    shown: dict[str, Any] = {}
    for arm in ARMS:
        mine = [r for r in rows if r["arm"] == arm and r["speedup"] is not None]
        keys = ("texts", "sources", "evaluated", "compiled", "verified", "output_tokens")
        shown[arm] = {
            "evaluations": sum(r["evaluations"] for r in mine),
            "by_model": {key: sum(r["model"][key] for r in mine) for key in keys},
            "model_seconds": round(sum(r["model"]["model_seconds"] for r in mine), 1),
            "wall_seconds": round(sum(r["wall_seconds"] for r in mine), 1),
            "against_seed": {name: found[arm]["ratio"] for name, found in again.items()},
        }
    ratio = round(math.exp(statistics.fmean(map(math.log, ratios))), 4) if ratios else None
    return {"problems": len(again), "ratio": ratio, "by_problem": direct, "arms": shown}


# --- command line ---


@contextlib.contextmanager
def serve_model(a: Namespace, work: Path) -> Iterator[str]:
    """The address of a server with the model, ready to write."""
    port, log = work / "port", work / TEXTS
    log.touch()
    model = f"{a.model}?temperature={a.temperature}&max_tokens={a.max_tokens}"
    words = ["--model", model, "--port-file", str(port), "--log", str(log)]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.lib.model_server", *words])
    try:
        end = time.monotonic() + LOADING_S
        while not port.is_file():
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the model could not be loaded in time: see above")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port.read_text()}"
    finally:
        process.kill()
        process.wait()


def main() -> int:
    made = result_files.parser(__doc__)
    made.add_argument("--model", required=True, metavar="FOLDER")
    made.add_argument("--problems", default="softmax,layer_norm,swiglu", help="as `search` takes them")
    made.add_argument("--evaluations", type=int, default=16, help="of each search")
    made.add_argument("--samples", type=int, default=12, help="of the filtered search, per parent")
    made.add_argument("--k", type=int, default=3, help="evaluations per parent")
    made.add_argument("--trials", type=int, default=6, help="configs of one source that may be timed")
    made.add_argument("--surrogate", default="auto", help="of the filtered search")
    made.add_argument("--alone", action="store_true", help="the language model alone proposes")
    made.add_argument(
        "--jobs",
        type=int,
        default=6,
        help="searches at once; all, if there are cores: rounds divide the time",
    )
    made.add_argument("--total-seconds", type=float, default=420.0, help="of searching and timing again")
    made.add_argument("--temperature", type=float, default=0.7)
    made.add_argument("--max-tokens", type=int, default=640, help="of one text")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    made.add_argument("--work", type=Path, help="keeps all logs and texts; must be new")
    made.set_defaults(stub_only=True)  # the device is not opened in this process
    a = result_files.parse_arguments(made)
    report = result_files.ResultFile(a, "search_llm")
    with tempfile.TemporaryDirectory(prefix="search-llm-") as scratch:
        work = a.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        report.finish(compare_arms(a, report, work.absolute()))
    return 0


def compare_arms(a: Namespace, report: result_files.ResultFile, work: Path) -> dict[str, Any]:
    """Both arms on every problem, then the best of them again; the summary."""
    problems: list[str] = a.problems.split(",")
    runs, loading = [SearchRun(problem, arm) for problem in problems for arm in ARMS], time.monotonic()
    rows: list[dict[str, Any]] = []
    with serve_model(a, work) as url:
        begun = time.monotonic()
        report.add("loading_seconds", round(begun - loading, 1))
        for one in run_searches(runs, a, url, begun + (1.0 - RETIMING) * a.total_seconds, work):
            rows.append(run_row(one, read_texts(work), work))
            report.add("runs", rows[-1])
            say(f"{one.run.name}: {rows[-1]['ended']}, {rows[-1]['speedup']} times the seed")
    again: dict[str, Any] = {}
    needed = RETIMED_S
    for number, problem in enumerate(problems):
        states = {
            arm: state for arm in ARMS if (state := read_run(SearchRun(problem, arm), work)) and state.scores
        }
        began = time.monotonic()
        left = begun + a.total_seconds - began
        if len(states) < len(ARMS) or left < needed:
            say(f"{problem} is not timed again: not both have a result, or there is no time")
            continue
        try:
            again[problem] = retime_best(states, a.device, left / (len(problems) - number), work / "retiming")
        except LaneFailure as error:
            say(f"{problem} was not timed again: {error}")
            continue
        needed = time.monotonic() - began
        report.add("retimed", {"problem": problem, "seconds": round(needed, 1), **again[problem]})
        say(f"{problem}: {again[problem]}")
    told = read_texts(work)
    busy = covered_seconds([(text["begin"], text["end"]) for text in told])
    return {
        **summary(rows, again),
        "tokens_per_second": round(sum(text["output_tokens"] for text in told) / busy, 1) if busy else None,
        "total_seconds": round(time.monotonic() - begun, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
