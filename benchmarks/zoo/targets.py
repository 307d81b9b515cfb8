"""Autotuned kernels of third-party programs as targets of `search` and `variants`, with no line written for them.

    FORECAST_AUTOTUNE=1 FORECAST_AUTOTUNE_CAPTURE=values FORECAST_AUTOTUNE_CACHE_DIR=/tmp/captures pytest their_tests
    python -m benchmarks.zoo.targets /tmp/captures --kernels 60 --seed 1 --out FILE

The folders are stores of programs that ran so. Of the kernels with two configs or more whose calls they hold, some are
drawn by seed. A kernel is accepted where its own source is judged right, and a wrong one is refused: one of its stores,
drawn by seed, writes another value. A store that the captured call does not reach makes no wrong source; then the next
one is changed. What is not accepted is listed with its reason. Without a CUDA device kernels are interpreted, which
shows whether targets are accepted and says nothing of seconds.
"""

from __future__ import annotations

import argparse
import ast
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.lib import result_files
from benchmarks.lib.result_files import ResultFile, say
from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.records.captured_call import CapturedCall
from forecast_autotune.store import Store
from forecast_autotune.variants import Origin, Provenance, Variant
from forecast_autotune.variants.signature import INTERPRETER
from forecast_harness.clocks.devices import ONE_QUEUE
from forecast_harness.commands.judge import build_plan, open_lane
from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.sandbox.lane_pools import LanePool
from forecast_harness.targets.kernels.user_kernel import UserKernel
from forecast_harness.trials.variants.files import BaseBinaries
from forecast_harness.trials.variants.verify import (
    VARIANT_LIMITS,
    VARIANT_PLAN,
    LaneJobs,
    survey,
    verify_variant,
)
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.verdict import ReasonCode, SolutionVerdict

WRONG_SOURCES = 3
"""Stores of a kernel that are changed, one after another, until a changed source is refused."""
_STORES = {"store": 1, "atomic_add": 1, "atomic_max": 1, "atomic_min": 1, "atomic_xchg": 1}
"""Functions that write, and the number of the argument that they write; a descriptor's method has it there, too."""
_UNLAUNCHED = (ReasonCode.FAILS, ReasonCode.TIMEOUT)
"""A wrong source that does not run shows nothing about what is verified."""


@dataclass(frozen=True)
class Target:
    """A kernel whose calls were captured."""

    store: Store
    call: CapturedCall

    @property
    def place(self) -> str:
        """As a user names it."""
        return f"{self.call.kernel.extra.get('module', '')}:{self.call.kernel.name}"


@dataclass
class TargetResult:
    """What became of a kernel."""

    place: str
    source_sha256: str
    accepted: bool = False
    reason: str = ""
    unvaried: Sequence[str] = ()
    wrong: str = ""
    """Why the wrong source was refused."""
    reading_s: float = 0.0
    first_verdict_s: float = 0.0
    """From the kernel as it was read to the verdict on its own source, in a lane that is open; 0 for none."""
    seconds: float = 0.0


def autotuned(folders: Sequence[Path]) -> list[Target]:
    """The kernels with two configs or more of these stores, each once, in the order of their names."""
    results: dict[str, Target] = {}
    for folder in folders:
        store = Store(folder)
        for call, _ in store.captures.every() if store.captures is not None else ():
            if len(call.configs) > 1:
                results.setdefault(call.kernel.source_sha256, Target(store, call))
    return sorted(results.values(), key=lambda t: (t.place, t.call.kernel.source_sha256))


def wrong_sources(source: str, rng: random.Random) -> Iterator[str]:
    """The source with one of its stores writing something else, each of them once in an order that is drawn."""
    tree = ast.parse(source)
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and _STORES.get(node.func.attr, len(node.args)) < len(node.args)
    ]
    for call in rng.sample(calls, len(calls)):
        assert isinstance(call.func, ast.Attribute)
        kept = call.args[_STORES[call.func.attr]]
        call.args[_STORES[call.func.attr]] = _another_value(kept)
        yield ast.unparse(tree)
        call.args[_STORES[call.func.attr]] = kept


def _another_value(value: ast.expr) -> ast.expr:
    text = ast.unparse(value)
    if isinstance(value, ast.Constant | ast.UnaryOp):
        return ast.parse(f"({text}) + 3", mode="eval").body
    return ast.parse(f"(({text}) * 2 + 1).to(({text}).dtype)", mode="eval").body


@dataclass
class Trials:
    """Judges targets, several at once."""

    plan: VerificationPlan
    device: str
    seed: int
    limit_s: float
    _reading: threading.Lock

    def judged(self, target: Target, lane: SandboxLane) -> TargetResult:
        """One kernel in a lane. Never raises: what fails is the reason."""
        result, began = TargetResult(target.place, target.call.kernel.source_sha256), time.monotonic()
        try:
            self._judge(target, lane, result)
        except (ForecastAutotuneError, ImportError, SyntaxError) as error:
            result.reason = f"{type(error).__name__}: {error}"[:600]
        result.seconds = time.monotonic() - began
        return result

    def _judge(self, target: Target, lane: SandboxLane, result: TargetResult) -> None:
        began = time.monotonic()
        with self._reading:  # imports of one process
            kernel = UserKernel.of(target.place, target.store)
            if kernel.kernel.source_sha256 != target.call.kernel.source_sha256:
                result.reason = "another source by now has that name"
                return
            subject = kernel.subjects(target.store)[0]
        result.reading_s = time.monotonic() - began
        binaries = BaseBinaries()
        began = time.monotonic()
        known = survey(subject, lane, plan=self.plan, binaries=binaries)
        result.unvaried = known.unvaried

        def verdict(source: str) -> SolutionVerdict:
            variant = Variant.of(
                subject.kernel,
                kernel.kernel.source_sha256,
                source,
                Provenance(Origin.HAND),
                configs=subject.configs,
            )
            return verify_variant(
                variant,
                subject,
                known,
                lane,
                device=self.device,
                plan=self.plan,
                binaries=binaries,
                limits=replace(VARIANT_LIMITS, wall_s=self.limit_s, trusted_s=self.limit_s),
            ).verdict

        right = verdict(f"# The same.\n{subject.source}")
        result.first_verdict_s = time.monotonic() - began
        if not right.accepted:
            result.reason = f"its own source is {right.judgement}: {_first_reason(right)}"
            return
        rng, said = random.Random(f"{self.seed} {result.source_sha256}"), "it has no store to change"
        for _, source in zip(range(WRONG_SOURCES), wrong_sources(subject.source, rng), strict=False):
            one = verdict(source)
            said = _first_reason(one) or "a wrong source is accepted"
            if not one.accepted and one.reasons and one.reasons[0].code not in _UNLAUNCHED:
                result.accepted, result.wrong = True, said
                return
        result.reason = f"no wrong source is refused: {said}"


def _first_reason(verdict: SolutionVerdict) -> str:
    return "; ".join(f"{r.code}: {r.detail}" for r in verdict.reasons[:1])[:300]


def main() -> int:
    """Judge, print a line for each kernel as soon as it is judged, and write the result."""
    parser = result_files.parser(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="STORE", help="stores with captured calls")
    parser.add_argument("--kernels", type=int, default=60, metavar="N", help="kernels that are drawn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", help="a device's number, or cpu (default: 0, if any)")
    parser.add_argument("--lanes", type=int, default=8, help="kernels that are judged at once")
    parser.add_argument("--cases", type=int, default=VARIANT_PLAN.cases)
    parser.add_argument(
        "--limit", type=float, default=90.0, metavar="S", help="seconds of a survey or a verdict"
    )
    parser.add_argument("--match", default="", help="only kernels whose place contains this")
    options = result_files.parse_arguments(parser, on_host=True)
    known = [t for t in autotuned(options.folders) if options.match in t.place]
    chosen = random.Random(options.seed).sample(known, min(options.kernels, len(known)))
    options.level = None
    plan = replace(build_plan(options), timed=VARIANT_PLAN.timed)
    say(f"{len(known)} autotuned kernels were captured, {len(chosen)} are judged on {plan.device}")
    report = result_files.ResultFile(options, "zoo-targets", options.seed)
    results = _judge_all(chosen, plan, options, report)
    times = [r.first_verdict_s for r in results if r.first_verdict_s]
    report.finish(
        {
            "captured": len(known),
            "judged": len(results),
            "accepted": sum(r.accepted for r in results),
            "first_verdict_median_s": statistics.median(times) if times else None,
            "not_accepted": {r.place: r.reason for r in results if not r.accepted},
        }
    )
    return 0


def _judge_all(
    chosen: Sequence[Target], plan: VerificationPlan, options: argparse.Namespace, report: ResultFile
) -> list[TargetResult]:
    device = INTERPRETER if plan.device == "cpu" else "device"
    trials = Trials(plan, device, options.seed, options.limit, threading.Lock())
    results = []
    with LanePool(lambda: open_lane(options, plan, ONE_QUEUE), options.lanes) as lanes:
        jobs: LaneJobs[Target, TargetResult] = LaneJobs(lanes, trials.judged)
        jobs.add(chosen)
        for _, result in jobs.results():
            results.append(result)
            report.add("kernels", asdict(result))
            state = "accepted" if result.accepted else "NOT"
            say(
                f"{len(results):3d} {state} {result.place} first verdict {result.first_verdict_s:.1f} s, all "
                f"{result.seconds:.1f} s: {result.wrong or result.reason}"[:240]
            )
        jobs.close()
    return results


if __name__ == "__main__":
    sys.exit(main())
