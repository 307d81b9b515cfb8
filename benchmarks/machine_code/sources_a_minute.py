"""Claim: sources of Triton packs judged to a verdict per minute by the gates for machine code, and the first's seconds.

    python -m benchmarks.machine_code.sources_a_minute --out benchmarks/results/sources_a_minute.json \
        [--packs softmax ...] [--seconds 60] [--configs 8] [--workers 0] [--no-verify] [--fake]

For each pack its own Triton solution is the seed, verified and tuned; what the mechanical rewrites make of it is
judged for `--seconds` of wall time, `--configs` launch configs each: compiled on all processors, checked on a small
call, timed against the incumbent's bound, and verified in full (`verify`, in a sandbox lane with the device) before
it takes the incumbent's place. A source whose first config cannot win counts as judged, as in a search. `--fake`
compiles for a device that is not there and launches on a driver without one (`g++`): times and rightness are made up.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.machine_code.fake_code import build_driver
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from forecast_harness.machine_code.compile_workers import CallCase, CompileWorkers
from forecast_harness.machine_code.gate_records import (
    GateCounts,
    LaunchOptions,
    ProposedSource,
    SourceVerdict,
)
from forecast_harness.machine_code.gates import SourceGates
from forecast_harness.machine_code.launch_options import write_launch_options
from forecast_harness.machine_code.pack_calls import PackCalls, PreparedCall
from forecast_harness.machine_code.pack_judging import facts_for_workers
from forecast_harness.machine_code.records import Program
from forecast_harness.machine_code.runner.client import ObservedLaunch, ProgramInputs, RunnerClient
from forecast_harness.machine_code.runner.driver import LIBRARY
from forecast_harness.packs.load import load_pack
from forecast_harness.packs.schema import Language, Pack, Solution
from forecast_harness.sandbox.lane import SandboxLane
from forecast_harness.search.judging.devices import verification_plan
from forecast_harness.search.novelty import signature
from forecast_harness.search.proposers.triton_rewrites import module_rewrites
from forecast_harness.verify.run import verify

PACKS = ("softmax", "matmul", "layer_norm", "swiglu", "cross_entropy")
CONFIGS: tuple[LaunchOptions, ...] = (
    {"num_warps": 4, "num_stages": 3},
    {"num_warps": 8, "num_stages": 3},
    {"num_warps": 2, "num_stages": 3},
    {"num_warps": 4, "num_stages": 2},
    {"num_warps": 8, "num_stages": 2},
    {"num_warps": 4, "num_stages": 4},
    {"num_warps": 1, "num_stages": 3},
    {"num_warps": 16, "num_stages": 2},
)


class UncheckedCall:
    """A call whose outputs are right whatever they are: for a driver that computes nothing."""

    def __init__(self, call: PreparedCall) -> None:
        self.arguments: CallCase = call.arguments
        self.given: ProgramInputs = call.given

    def wrong(self, program: Program, launches: Sequence[ObservedLaunch]) -> str:
        """Nothing."""
        return ""


def rewrites(source: str, entry: str, configs: int) -> Iterator[ProposedSource]:
    """What can be made of a source, and of that again, each with the first `configs` launch configs."""
    known = {signature("triton", source)}
    level = [source]
    number = itertools.count()
    for _ in range(3):
        following = []
        for parent in level:
            for made in module_rewrites(parent, entry):
                if (like := signature("triton", made.text)) in known:
                    continue
                known.add(like)
                following.append(made.text)
                yield ProposedSource(f"{next(number)} {'+'.join(made.names)}", made.text, CONFIGS[:configs])
        level = following


def verifier(pack: Pack, solution: Solution, lane: SandboxLane | None) -> Callable[..., str]:
    """Verifies a source in one config in full; says '' without a lane."""

    def found(source: ProposedSource, config: LaunchOptions) -> str:
        if lane is None:
            return ""
        text = write_launch_options(source.source, config)
        verdict = verify(pack, replace(solution, source=text), lane, plan=verification_plan("cuda"))
        return "" if verdict.accepted else "; ".join(r.detail for r in verdict.reasons)[:500]

    return found


def judge_pack(
    name: str,
    arguments: argparse.Namespace,
    workers: CompileWorkers,
    runner: RunnerClient,
    lane: SandboxLane | None,
) -> dict[str, Any]:
    """Judge rewrites of one pack's Triton solution for some seconds; what came of it."""
    pack = load_pack(name)
    (solution, *_) = [s for s in pack.solutions if s.language is Language.TRITON]
    large = pack.timed_workloads("cuda", Language.TRITON)[0]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        calls = PackCalls(pack, Path(folder))
        small, timed = (
            calls.draw(),
            calls.draw(pack.checked_workloads[0].axes if arguments.null else large.axes),
        )
        pair: Any = [UncheckedCall(c) if arguments.null else c for c in (small, timed)]
        drawn = time.perf_counter() - began
        told: list[tuple[float, GateCounts]] = []

        def progress(counts: GateCounts) -> None:
            told.append((time.perf_counter() - began, counts))

        gates = SourceGates(
            workers, runner, solution.entry, *pair, verify=verifier(pack, solution, lane), progress=progress
        )
        seed = gates.seed(ProposedSource("seed", solution.source, CONFIGS[: arguments.configs]))
        seeded = time.perf_counter() - began
        verdicts: list[SourceVerdict] = []
        first = 0.0
        for verdict in gates.judge(
            until(rewrites(solution.source, solution.entry, arguments.configs), arguments.seconds)
        ):
            first = first or time.perf_counter() - began - seeded
            verdicts.append(verdict)
        spent = time.perf_counter() - began - seeded
    gaps = [b[0] - a[0] for a, b in itertools.pairwise(told)]
    found = {
        "pack": name,
        "seed": {"outcome": str(seed.outcome), "detail": seed.detail[:300], "seconds": seed.seconds},
        "inputs_s": drawn,
        "seed_s": seeded - drawn,
        "first_verdict_s": first,
        "judged": len(verdicts),
        "seconds": spent,
        "a_minute": 60 * len(verdicts) / spent if spent else 0.0,
        "longest_silence_s": max(gaps, default=0.0),
        "configs_timed": sum(v.timed for v in verdicts),
        "counts": gates.counts.to_json(),
        "gates": dict(Counter(str(v.gate) for v in verdicts)),
        "outcomes": dict(Counter(str(v.outcome) for v in verdicts)),
        "gain": seed.seconds / gates.incumbent_s if gates.incumbent_s else None,
        "host_code": sum(v.host_code for v in verdicts),
        "refusals": [f"{v.name}: {v.outcome}: {v.detail[:160]}" for v in verdicts if v.outcome != "ok"][:40],
    }
    say(
        f"{name}: {len(verdicts)} judged in {spent:.1f} s, {found['a_minute']:.1f} a minute, first after {first:.2f} s"
    )
    return found


def until(sources: Iterator[ProposedSource], seconds: float) -> Iterator[ProposedSource]:
    """Sources while there is time."""
    limit = time.perf_counter() + seconds
    while time.perf_counter() < limit and (one := next(sources, None)) is not None:
        yield one


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--fake", dest="null", action="store_true", help="a driver without a device; needs g++")
    made.add_argument("--packs", nargs="+", default=list(PACKS))
    made.add_argument("--seconds", type=float, default=60.0, help="wall time of each pack's judging")
    made.add_argument("--configs", type=int, default=8)
    made.add_argument("--workers", type=int, default=0, help="compile workers; 0 for all processors")
    made.add_argument("--no-verify", action="store_true", help="without full verification of new incumbents")
    arguments = parse_arguments(made)
    result = ResultFile(arguments, "sources judged to a verdict per minute through machine code", 0)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        library = str(build_driver(folder)) if arguments.null else LIBRARY
        began = time.perf_counter()
        runner = stack.enter_context(RunnerClient(library))
        runner_s = time.perf_counter() - began
        workers = stack.enter_context(CompileWorkers(facts_for_workers(runner), arguments.workers))
        workers_s = time.perf_counter() - began - runner_s
        lane = None
        if not (arguments.null or arguments.no_verify):
            lane = stack.enter_context(SandboxLane(device="0"))
        say(f"runner after {runner_s:.2f} s, {workers.count} compile workers after {workers_s:.2f} s more")
        found = []
        for name in arguments.packs:
            found.append(judge_pack(name, arguments, workers, runner, lane))
            result.add("packs", found[-1])
        result.finish(
            {
                "runner_start_s": runner_s,
                "workers_start_s": workers_s,
                "workers": workers.count,
                "a_minute": 60 * sum(f["judged"] for f in found) / sum(f["seconds"] for f in found),
                "least_a_minute": min(f["a_minute"] for f in found),
                "first_verdict_s": max(f["first_verdict_s"] for f in found),
                "longest_silence_s": max(f["longest_silence_s"] for f in found),
                "faults": len(runner.faults),
                "restarts": runner.restarts,
            }
        )


if __name__ == "__main__":
    main()
