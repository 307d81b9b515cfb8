"""Claim: how many sources a minute `search` judges, how soon the first, and what it gains, as users run it.

    python -m benchmarks.machine_code.searches --out benchmarks/results/machine_code_searches.json \
        [--targets softmax ... FILE.py:FN] [--libraries fla_softmax ...] [--seconds 120] [--trials 8] \
        [--paths machine-code] [--surrogate auto] [--lanes 1] [--keep FOLDER]

Each target is searched by the command `forecast-autotune search TARGET --device cuda --path PATH --seconds N`, in a
process of its own, and its log is watched. A verdict is any result of a source but the harness's own failures.
Before it, a search of the seed alone fills whatever caches there are: the time of its first verdict is listed as cold.
`--paths machine-code host-code` compares the two. `--keep` leaves the log of each target's last search in a folder.

`--libraries` names kernels of `benchmarks.lib.search.library_kernels`: a workload of the library runs once under
`forecast-autotune run`, with a store of its own, and the kernel is searched as `package.module:fn` with that store. The
libraries lie in a folder that PYTHONPATH names.
"""

from __future__ import annotations

import itertools
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.lib.processes.timed_lines import TimedLines
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from benchmarks.lib.search.library_kernels import LIBRARY_KERNELS, record_calls, search_environment
from forecast_autotune.records import Outcome
from forecast_harness.search.log import read_log
from forecast_harness.search.state import SearchState, replay_events

KERNELS = (
    "softmax.py:online_softmax",
    "matmul.py:matmul_kernel",
    "layer_norm.py:_layer_norm_fwd_fused",
    "rms_norm.py:add_rms_norm",
    "swiglu.py:swiglu_kernel",
    "cross_entropy.py:cross_entropy_fwd",
    "cumsum.py:row_cumsum",
    "attention.py:attention_fwd",
    "causal_conv1d.py:causal_conv1d_fwd",
    "transpose.py:transpose_kernel",
)
"""Targets of `benchmarks/kernels`, with 72 to 100 configs each."""
_KERNELS_FOLDER = Path("benchmarks/kernels")
_WARM_UP_S = 10.0
"""Seconds of a search that its rate leaves out."""
_POLL_S = 0.1
_KIND = re.compile(rb'^\{"type":"([a-z ]+)"', re.MULTILINE)
"""The kind of an event, in a line of a search's log."""


def search_target(
    target: str,
    path: str,
    options: Any,
    budget: int = 100_000,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run one search of so many measurements at most; when its lines, verdicts and gains came.

    `environment`: of the search's process; None for this one's.
    """
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "search"
        command = [sys.executable, "-m", "forecast_autotune", "search", target, "--device", options.device]
        command += ["--path", path, "--seconds", f"{options.seconds:g}", "--trials", str(options.trials)]
        command += ["--gpu-budget", str(budget), "--surrogate", options.surrogate]
        command += ["--seed", str(options.seed), "--out", str(folder)]
        command += ["--lanes", str(options.lanes)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        printed = TimedLines(process.stdout)
        judged: list[float] = []
        events: list[tuple[float, str]] = []
        faster_s: float | None = None
        log = folder / "log.jsonl"
        while process.poll() is None:
            time.sleep(_POLL_S)
            kinds = _KIND.findall(log.read_bytes()) if log.exists() else []
            now = round(printed.seconds, 1)
            events += [(now, kind.decode()) for kind in kinds[len(events) :]]
            if kinds.count(b"finished") > len(judged):
                state = replay_events(read_log(log))
                now = printed.seconds
                judged += [now] * (len(state.judged) - len(judged))
                if faster_s is None and state.scores.get(state.incumbent, 0.0) < 0:
                    faster_s = now
        lines, spent = printed.all(), printed.seconds
        ended = replay_events(read_log(log)) if log.exists() else None
        if options.keep is not None and log.exists():
            options.keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(log, options.keep / f"{re.sub(r'[^a-z0-9_]+', '_', target.lower())}.jsonl")
    file = target.partition(":")[0]
    result = told(ended, judged, spent) | {
        "target": Path(file).name if file.endswith((".py", ".cu")) else target,
        "path": path,
        "status": process.returncode,
        "beyond_the_limit_s": max(0.0, spent - options.seconds),
        "first_line_s": lines[0][0] if lines else None,
        "first_faster_s": faster_s,
        "remarks": [line for _, line in lines if "host code" in line or "machine-code" in line][:5],
        "told": [f"{second:.1f} s: {line[:160]}" for second, line in lines[:40]],
        "events": events,
        "verdicts_s": [round(second, 1) for second in judged],
    }
    say(f"{result['target']} by {path}: {result['judged']} judged, {result['a_minute']:.1f} a minute")
    return result


def told(state: SearchState | None, judged: list[float], spent: float) -> dict[str, Any]:
    """Figures of a search's state and of the seconds at which its verdicts came."""
    if state is None:
        return {"judged": 0, "a_minute": 0.0, "first_verdict_s": None, "seconds": spent, "paths": {}}
    steady = [s for s in judged if s > judged[0] + _WARM_UP_S]
    minutes = (steady[-1] - judged[0] - _WARM_UP_S) / 60 if steady else 0.0
    results = list(state.judged.values())
    right = [r for n, r in state.judged.items() if r.outcome is Outcome.OK and n not in state.seeds]
    given_up = [r for r in right if "given_up_after" in r.facts]
    at_work = sum(r.device_seconds for n, r in state.judged.items() if n != state.seeds[0])
    return {
        "judged": len(results),
        "configs_of_a_right_source": statistics.fmean(r.measurements for r in right) if right else None,
        "configs_of_one_not_given_up": statistics.fmean(r.measurements for r in right if r not in given_up)
        if len(right) > len(given_up)
        else None,
        "given_up": len(given_up),
        "runner_at_work": at_work / (judged[-1] - judged[0]) if len(judged) > 1 else 0.0,
        "a_minute": len(steady) / minutes if minutes else 0.0,
        "configs_timed": sum(r.measurements for r in results),
        "first_verdict_s": judged[0] if judged else None,
        "seconds": spent,
        "outcomes": dict(Counter(str(r.outcome) for r in results)),
        "paths": dict(Counter(str(r.facts.get("path", "host code")) for r in results)),
        "reasons": dict(Counter(str(r.facts["path_reason"]) for r in results if "path_reason" in r.facts)),
        "gain": 2**-state.best_score,
        "gain_in_search": 2 ** -state.scores.get(state.incumbent, 0.0),
        "confirmed": state.evidence(state.best) if state.scores else "",
        "device_seconds": sum(r.device_seconds for r in results),
        "nodes": [
            [str(r.outcome), r.measurements, round(r.wall_seconds, 2), r.facts.get("spent", {})]
            for r in results
        ],
        "stopped": state.stopped.reason if state.stopped else "",
        "confirming": {
            n: {**j.facts.get("spent", {}), "all": j.wall_seconds} for n, j in state.confirmed.items()
        },
        "verifying": [
            {**v.found.facts.get("spent_verifying", {}), "all": v.found.wall_seconds}
            for v in state.verifications
        ],
    }


def search_paths(
    target: str, options: Any, environment: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """Search a target by each path, where caches are to be cold first for its seed alone."""
    for path in options.paths:
        cold = {} if options.warm else search_target(target, path, options, 1, environment)
        result = search_target(target, path, options, environment=environment)
        yield result | {"cold_first_verdict_s": cold.get("first_verdict_s")}


def search_library(name: str, options: Any) -> Iterator[dict[str, Any]]:
    """The same for a library's kernel, by its name in the table, after its library has called it."""
    kernel = LIBRARY_KERNELS[name]
    with tempfile.TemporaryDirectory() as folder:
        environment = search_environment(Path(folder))
        calls = record_calls(kernel.place, kernel.program(), environment)
        say(f"{name}: {calls['problems']} problems in {calls['seconds']:.0f} s, {calls['configs']} configs")
        about = {"target": name, "kernel": kernel.place, "library": kernel.version(), "calls": calls}
        for result in search_paths(kernel.place, options, environment):
            yield result | about


def _read_options() -> Any:
    command_line = parser(__doc__)
    command_line.add_argument(
        "--targets", nargs="+", help="packs, or FILE.py:FN; by default ten kernels, none beside --libraries"
    )
    command_line.add_argument(
        "--libraries",
        nargs="+",
        choices=tuple(LIBRARY_KERNELS),
        default=[],
        metavar="NAME",
        help=f"kernels of public libraries: {', '.join(LIBRARY_KERNELS)}",
    )
    command_line.add_argument(
        "--paths", nargs="+", choices=("machine-code", "host-code", "auto"), default=["auto"]
    )
    command_line.add_argument("--seconds", type=float, default=120.0)
    command_line.add_argument("--trials", type=int, default=8, help="configs of one source")
    command_line.add_argument("--surrogate", default="auto")
    command_line.add_argument("--lanes", type=int, default=1, help="devices")
    command_line.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try the script itself"
    )
    command_line.add_argument("--seed", type=int, default=0)
    command_line.add_argument("--keep", type=Path, help="folder for the searches' logs")
    command_line.add_argument(
        "--warm", action="store_true", help="caches are warm: no search of the seed alone before"
    )
    early, _ = command_line.parse_known_args()
    arguments = parse_arguments(command_line, on_host=early.device == "cpu")
    if arguments.targets is None:
        kernels = [str(_KERNELS_FOLDER / kernel) for kernel in KERNELS]
        arguments.targets = [] if arguments.libraries else kernels
    for name in arguments.libraries:
        try:
            LIBRARY_KERNELS[name].version()
        except ValueError as error:
            command_line.error(str(error))
    return arguments


def main() -> None:
    arguments = _read_options()
    result = ResultFile(arguments, "sources that `search` judges a minute", arguments.seed)
    results = []
    searches = [search_paths(target, arguments) for target in arguments.targets]
    searches += [search_library(name, arguments) for name in arguments.libraries]
    for one in itertools.chain.from_iterable(searches):
        results.append(one)
        result.add("searches", one)
    by_path = {p: [f for f in results if f["path"] == p] for p in arguments.paths}
    result.finish(
        {
            path: {
                "searches": len(all_of),
                "judged": sum(f["judged"] for f in all_of),
                "least_a_minute": min(f["a_minute"] for f in all_of),
                "first_verdict_s": max(f["first_verdict_s"] or f["seconds"] for f in all_of),
                "cold_first_verdict_s": max(f["cold_first_verdict_s"] or f["seconds"] for f in all_of),
                "beyond_the_limit_s": max(f["beyond_the_limit_s"] for f in all_of),
                "configs_of_a_right_source": min(f.get("configs_of_a_right_source") or 0.0 for f in all_of),
                "runner_at_work": min(f.get("runner_at_work", 0.0) for f in all_of),
                "first_line_s": max(f["first_line_s"] or f["seconds"] for f in all_of),
            }
            for path, all_of in by_path.items()
        }
    )


if __name__ == "__main__":
    main()
