"""Claim: how far a search of a pack comes when its nodes are judged through machine code.

    python -m benchmarks.machine_code.pack_search --out benchmarks/results/machine_code_search.json \
        [--packs softmax ...] [--seconds 120] [--trials 8] [--workers 0] [--fake]

The search is that of `forecast-autotune search PACK --device cuda --seconds N --surrogate none`, mechanical
proposer, with the lanes of `open_pack_judges`. Told are the seconds to the first verdict and to the best node, the
verdicts per minute, and the confirmed gain. `--fake` compiles for a device that is not there and launches on a
driver without one (`g++`): times, rightness and confirmations are made up.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.lib.machine_code.fake_code import build_driver
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from benchmarks.machine_code.sources_a_minute import UncheckedCall
from forecast_autotune.records import Outcome
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.machine_code.compile_workers import CompileWorkers
from forecast_harness.machine_code.node_judging import MachineCodeJudge, TrialCalls
from forecast_harness.machine_code.pack_calls import PackCalls
from forecast_harness.machine_code.pack_judging import facts_for_workers, open_pack_judges
from forecast_harness.machine_code.runner.client import RunnerClient
from forecast_harness.packs.load import load_pack
from forecast_harness.packs.schema import Language
from forecast_harness.search.history.events import ConfirmationJob, NodeJob
from forecast_harness.search.history.state import SearchState
from forecast_harness.search.judging.devices import device_slug
from forecast_harness.search.lanes.local_lanes import LocalJudgePool
from forecast_harness.search.novelty import node_identity
from forecast_harness.search.proposers import open_proposer
from forecast_harness.search.records import (
    Node,
    NodeResult,
    SearchBudget,
    SearchContext,
    SearchSettings,
    SearchTarget,
    TargetKind,
)
from forecast_harness.search.run import search
from forecast_harness.search.targets import open_target, pack_of
from forecast_harness.verify.run import harness_hash

PACKS = ("softmax", "matmul", "layer_norm", "swiglu", "cross_entropy")


class ConfirmingJudge:
    """Confirms whatever it is given, and judges no host code: for a driver that computes nothing."""

    def judge(self, job: NodeJob) -> NodeResult:
        """Nothing is known of host code here."""
        return NodeResult(Outcome.INFRASTRUCTURE, feedback="host code is not judged in a dry run")

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        """All as fast as the seed."""
        return {n.id: NodeResult(Outcome.OK, log2_ratio=0.0, stage="confirm") for n in confirm.nodes}

    def close(self) -> None:
        """Nothing is held."""


def null_target(name: str) -> tuple[SearchTarget, tuple[Node, ...]]:
    """A pack's target for a device that is not there, from its own Triton solutions."""
    pack = load_pack(name)
    seeds = [s for s in pack.solutions if s.language is Language.TRITON]
    target = SearchTarget(
        TargetKind.PACK, name, pack.id, "triton", seeds[0].entry, "null", {"pack": pack.to_json()}
    )
    nodes = tuple(
        Node(
            node_identity(target.id, "triton", s.source),
            s.source,
            "triton",
            (),
            Provenance(Origin.HAND, note=s.name),
        )
        for s in seeds
    )
    return target, nodes


@contextmanager
def null_judges(target: SearchTarget, folder: Path, workers: int) -> Iterator[LocalJudgePool]:
    """Judges over a driver without a device."""
    pack = pack_of(target)
    with ExitStack() as stack:
        runner = stack.enter_context(RunnerClient(str(build_driver(folder)), flush_bytes=1 << 20))
        builder = stack.enter_context(CompileWorkers(facts_for_workers(runner), workers))
        calls = PackCalls(pack, folder)
        timed: dict[str, Any] = {
            w.name: UncheckedCall(calls.draw({n: int(v) for n, v in w.axes.items()}))
            for w in pack.checked_workloads[:1]
        }
        judge = MachineCodeJudge(
            runner,
            builder,
            TrialCalls(UncheckedCall(calls.draw()), timed),
            target.entry,
            verify=lambda node, config: "",
            host=ConfirmingJudge,
            device="null",
        )
        pool = LocalJudgePool(lambda number: judge, 2 * builder.count)
        stack.callback(pool.close)
        yield pool


def search_pack(name: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Search one pack; what came of it, and when."""
    target, seeds = null_target(name) if arguments.null else open_target(name, device="cuda")
    settings = SearchSettings(
        SearchBudget(None, wall_seconds=arguments.seconds),
        surrogate="none",
        trials=arguments.trials,
        k=8,
        seed=arguments.seed,
    )
    began = time.perf_counter()
    judged: list[float] = []

    def watch(state: SearchState) -> None:
        judged.extend([time.perf_counter() - began] * (len(state.judged) - len(judged)))

    slug = "null" if arguments.null else device_slug("cuda")
    context = SearchContext(target.id, (), slug, {}, "", harness_hash())
    opened = (
        null_judges(target, folder, arguments.workers)
        if arguments.null
        else open_pack_judges(target, folder=folder, workers=arguments.workers)
    )
    with opened as lanes:
        ready_s = time.perf_counter() - began
        proposer = open_proposer("mechanical", target)
        state = search(
            target,
            seeds,
            settings=settings,
            context=context,
            proposers={"mechanical": proposer},
            forecaster=None,
            lanes=lanes,
            folder=folder,
            watch=watch,
        )
        proposer.close()
        restarts = sum(lane.restarts for lane in lanes.lanes)
    spent = time.perf_counter() - began
    best = min(state.scores.values(), default=0.0)
    found = {
        "pack": name,
        "ready_s": ready_s,
        "first_verdict_s": judged[0] if judged else None,
        "judged": len(judged),
        "a_minute": 60 * len(judged) / (judged[-1] - ready_s) if judged else 0.0,
        "seconds": spent,
        "best_log2_ratio": best,
        "outcomes": dict(Counter(str(r.outcome) for r in state.judged.values())),
        "paths": dict(Counter(str(r.facts.get("path", "host code")) for r in state.judged.values())),
        "stopped": state.stopped.reason if state.stopped else "",
        "lane_restarts": restarts,
    }
    say(f"{name}: {found['judged']} judged, {found['a_minute']:.1f} a minute, best {2**-best:.3f}x")
    return found


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--fake", dest="null", action="store_true", help="a driver without a device; needs g++")
    made.add_argument("--packs", nargs="+", default=list(PACKS))
    made.add_argument("--seconds", type=float, default=120.0)
    made.add_argument("--trials", type=int, default=8, help="configs of one source")
    made.add_argument("--workers", type=int, default=0, help="compile workers; 0 for all processors")
    made.add_argument("--seed", type=int, default=0)
    arguments = parse_arguments(made)
    result = ResultFile(arguments, "a search through machine code", arguments.seed)
    found = []
    for name in arguments.packs:
        with tempfile.TemporaryDirectory() as folder:
            found.append(search_pack(name, arguments, Path(folder)))
        result.add("searches", found[-1])
    result.finish(
        {
            "searches": len(found),
            "least_a_minute": min(f["a_minute"] for f in found),
            "judged": sum(f["judged"] for f in found),
            "first_verdict_s": max(f["first_verdict_s"] or 0.0 for f in found),
        }
    )


if __name__ == "__main__":
    main()
