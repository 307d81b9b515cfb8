"""Claim: the results of searches are as much faster as they say, timed again beside the seed in one process.

    python -m benchmarks.machine_code.searches --keep FOLDER ...
    python -m benchmarks.machine_code.winners_in_turns FOLDER --out FILE.json [--rounds 200] [--device cuda]

For the log of every search in FOLDER: the seed in its best config and the winner in its own are launched in turns at
every call that the search timed, the seed twice (the noise); their outputs are compared. With `--device cpu` all is
compiled for an H200 that is not there, and times are made up: to try the script.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib import kernel_timing
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from forecast_autotune.records import Config
from forecast_autotune.variants.entry import KernelEntry
from forecast_harness.records import SearchTarget
from forecast_harness.search.log import read_log
from forecast_harness.search.state import SearchState, replay_events
from forecast_harness.targets.search_target import subjects_of
from forecast_harness.trials.kernel_calls import TimedCall
from forecast_harness.trials.kernel_cell import fill_tensor, relative_error
from forecast_integrations.triton.null_device import null_device
from forecast_integrations.triton.variants.loading import import_text

CLAIM = "machine_code_winners_in_turns"
WRONG = 0.02
"""Share of the seed's largest value, which outputs in half precision stay far within."""


class _Launch:
    """One source in one config at one call, on tensors of its own."""

    def __init__(self, source: str, config: Config, call: TimedCall, entry: str, device: str) -> None:
        result = call.to_payload()
        generator = torch.Generator(device).manual_seed(7)
        self.tensors: dict[str, torch.Tensor] = {}
        for one in result["tensors"]:
            flat = torch.zeros(one["span"], dtype=getattr(torch, one["dtype"]), device=device)
            if call.has_values:
                flat.copy_(call.drawn.memory[one["name"]].reshape(-1))
            elif not one["zeroed"]:
                fill_tensor(flat, result["least"], generator)
            self.tensors[one["name"]] = flat.as_strided(one["shape"], one["stride"])
        how = call.launch(source, config)
        named = {**self.tensors, **how["scalars"]}
        answer = KernelEntry.of(import_text(source), entry)
        self.run = partial(answer.run, tuple(how["grid"]), named, how["meta"], how["options"])


def measure(log: Path, arguments: Any) -> dict[str, Any]:
    """A search's winner beside its seed."""
    state = replay_events(read_log(log))
    assert state.started is not None
    target, seed, best = state.started.target, state.seeds[0], state.best
    row = {"target": log.stem, "winner": state.nodes[best].provenance.note, "evidence": state.evidence(best)}
    row |= {"told": 2**-state.best_score, "calls": []}
    if best == seed:
        return row | {"gain": 1.0, "noise": 1.0}
    for call in map(TimedCall.of, subjects_of(target)):
        row["calls"].append(_beside(state, target, call, arguments))
    shares = [math.log(one["seed"] / one["winner"]) for one in row["calls"]]
    noise = [abs(math.log(one["seed"] / one["again"])) for one in row["calls"]]
    return row | {"gain": math.exp(statistics.fmean(shares)), "noise": math.exp(max(noise))}


def _beside(state: SearchState, target: SearchTarget, call: TimedCall, arguments: Any) -> dict[str, Any]:
    result = {}
    for name, node in {"seed": state.seeds[0], "winner": state.best}.items():
        known = state.confirmed.get(node) if node != state.seeds[0] else None
        config = Config.from_json((known or state.judged[node]).config or state.judged[node].config)
        result[name] = _Launch(state.nodes[node].source, config, call, target.entry, arguments.device)
        result[name].run()
    worst = max(
        relative_error(result["winner"].tensors[n].float(), t.float())
        for n, t in result["seed"].tensors.items()
    )
    runs = [result["seed"].run, result["winner"].run, result["seed"].run]
    times = kernel_timing.time_in_turns(runs, arguments.rounds)
    ms = dict(zip(("seed", "winner", "again"), map(statistics.median, times), strict=True))
    return {**ms, "error": worst, "right": worst <= WRONG}


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Gains of winners that are right at all calls."""
    gains = [r["gain"] for r in rows if all(c["right"] for c in r["calls"])]
    return {
        "searches": len(rows),
        "wrong": [r["target"] for r in rows if not all(c["right"] for c in r["calls"])],
        "three_percent": sum(g >= 1.03 for g in gains),
        "median_gain": statistics.median(gains),
        "largest_noise": max(r["noise"] for r in rows),
        "gains": {r["target"]: round(r["gain"], 4) for r in rows},
    }


def main() -> int:
    command_line = parser(__doc__)
    command_line.add_argument("folder", type=Path, help="with the logs that searches have kept")
    command_line.add_argument("--rounds", type=int, default=200)
    command_line.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    early, _ = command_line.parse_known_args()
    on_host = early.device == "cpu"
    arguments = parse_arguments(command_line, on_host=on_host)
    result = ResultFile(arguments, CLAIM)
    rows = []
    with null_device() if on_host else contextlib.nullcontext():
        for log in sorted(arguments.folder.glob("*.jsonl")):
            rows.append(measure(log, arguments))
            result.add("winners", rows[-1])
            say(f"{log.stem}: {rows[-1]['gain']:.3f}x in turns, {rows[-1]['told']:.3f}x told")
    result.finish(summary_of(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
