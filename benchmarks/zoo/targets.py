"""Autotuned kernels of third-party programs as targets of `search` and `variants`, with no line written for them.

    python -m benchmarks.zoo.targets fetch --to FOLDER [--only NAMES]
    python -m benchmarks.zoo.targets capture --from FOLDER --to CAPTURES [--null] [--seconds 20] [--only NAMES]
    python -m benchmarks.zoo.targets judge CAPTURES --kernels 60 --seed 1 --out FILE

`fetch` needs a network, git and pip: it packs the packages of `packages.toml` at their commits into one archive. A
seeded sample of each package's own tests runs with FORECAST_AUTOTUNE=1, FORECAST_AUTOTUNE_CAPTURE=values and no
clock, in stores of its own below CAPTURES; any other store of a program that ran so does as well. Packages with more
weight in `packages.toml`, which have more kernels, run in more parts. Of the kernels with two configs or more whose
calls they hold, some are drawn by seed. A kernel is accepted where its own source is judged right under the first
config that works, and a wrong one is refused: one of its stores, drawn by seed, writes another value. A store that
the captured call does not reach makes no wrong source; then the next one is changed, and after some of them all. What
is not accepted is listed with its reason. Without a CUDA device kernels are interpreted, which shows whether targets
are accepted and says nothing of seconds.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.lib import result_files
from benchmarks.lib.environment import ROOT
from benchmarks.lib.libraries.installation import PACKAGE_FOLDERS
from benchmarks.lib.result_files import ResultFile, say
from benchmarks.lib.zoo.packages import Package, fetch, packages, unpack
from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.records.captured_call import CapturedCall
from forecast_autotune.store import Store
from forecast_autotune.store.files import CAPTURES
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

_CORES, _START_S = 2, 60.0
"""Cores of a package while its tests run, and seconds that these may take beside."""
WRONG_SOURCES = 4
"""Stores of a kernel that are changed, one after another, until a changed source is refused; then all are."""
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
        """As a user names it where other kernels have its name."""
        kernel = self.call.kernel
        return f"{kernel.extra.get('module', '')}:{kernel.name}@{kernel.source_sha256[:12]}"


@dataclass
class TargetResult:
    """The outcome of a kernel."""

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
    """The source with one of its stores writing something else, for some in an order that is drawn; then with all."""
    tree = ast.parse(source)
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and _STORES.get(node.func.attr, len(node.args)) < len(node.args)
    ]
    for call in rng.sample(calls, min(WRONG_SOURCES, len(calls))):
        kept = _change(call)
        yield ast.unparse(tree)
        call.args[_place(call)] = kept
    if len(calls) > 1:
        for call in calls:
            _change(call)
        yield ast.unparse(tree)


def _place(call: ast.Call) -> int:
    assert isinstance(call.func, ast.Attribute)
    return _STORES[call.func.attr]


def _change(call: ast.Call) -> ast.expr:
    """Have a call write something else; returns what it wrote."""
    kept = call.args[_place(call)]
    call.args[_place(call)] = _another_value(kept)
    return kept


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
                configs=(known.config,),  # one shows whether it is right; a list may take minutes to compile
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
        for source in wrong_sources(subject.source, rng):
            one = verdict(source)
            said = _first_reason(one) or "a wrong source is accepted"
            if not one.accepted and one.reasons and one.reasons[0].code not in _UNLAUNCHED:
                result.accepted, result.wrong = True, said
                return
        result.reason = f"no wrong source is refused: {said}"


def _first_reason(verdict: SolutionVerdict) -> str:
    return "; ".join(f"{r.code}: {r.detail}" for r in verdict.reasons[:1])[:300]


def main() -> int:
    """Fetch, capture, or judge: print a line for each kernel as soon as it is judged, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(dest="step", required=True)
    fetching = steps.add_parser("fetch")
    fetching.add_argument("--to", type=Path, required=True, help="the folder that gets the archive")
    capturing = steps.add_parser("capture")
    capturing.add_argument("--from", dest="source", type=Path, required=True, help="the folder of `fetch`")
    capturing.add_argument(
        "--to", type=Path, required=True, help="the folder that gets a store for each package"
    )
    capturing.add_argument("--null", action="store_true", help="no GPU: compile for a null device")
    capturing.add_argument("--seconds", type=float, default=20.0, help="seconds of tests of a package")
    capturing.add_argument("--limit", type=float, default=200.0, help="seconds of all packages")
    capturing.add_argument("--seed", type=int, default=0)
    for step in (fetching, capturing):
        step.add_argument("--only", nargs="*", default=[], help="names of packages")
    judging = steps.add_parser("judge")
    judging.add_argument(
        "folders", nargs="+", type=Path, metavar="STORE", help="stores, or folders of stores"
    )
    judging.add_argument("--out", type=Path, required=True, help="the result file (JSON)")
    judging.add_argument("--kernels", type=int, default=60, metavar="N", help="kernels that are drawn")
    judging.add_argument("--seed", type=int, default=1)
    judging.add_argument("--device", help="a device's number, or cpu (default: 0, if any)")
    judging.add_argument("--lanes", type=int, default=8, help="kernels that are judged at once")
    judging.add_argument("--cases", type=int, default=VARIANT_PLAN.cases)
    judging.add_argument("--limit", type=float, default=90.0, metavar="S", help="seconds of a verdict")
    judging.add_argument("--match", default="", help="only kernels whose place contains this")
    options = parser.parse_args()
    if options.step == "fetch":
        say(str(fetch(options.to, list(packages(options.only).values()))))
        return 0
    return _capture(options) if options.step == "capture" else _judge(options)


def _capture(options: argparse.Namespace) -> int:
    wanted = list(packages(options.only).values())
    cores = sorted(os.sched_getaffinity(0))
    size = 1 if options.null else _CORES
    shares = [cores[i : i + size] for i in range(0, len(cores), size)]
    until = time.monotonic() + options.limit
    with tempfile.TemporaryDirectory(prefix="zoo-") as name, ThreadPoolExecutor(len(shares)) as pool:
        top = Path(name)
        unpack(options.source, top)
        each = [
            pool.submit(_capture_package, package, part, top, shares, until, options)
            for part in range(max(package.weight for package in wanted))
            for package in wanted
            if part < package.weight
        ]
        for one in each:
            say(one.result())
    return 0


def _suite_command(package: Package, top: Path, home: Path, **given: Any) -> tuple[list[str], dict[str, str]]:
    """Arguments behind `python`, and variables, of a process that runs tests of a package.

    `top` is the folder that the archive is unpacked in, `home` an empty one for caches, and `given` the rest of what
    `benchmarks.lib.zoo.suite` takes.
    """
    ours = [str(ROOT / folder) for folder in PACKAGE_FOLDERS]
    path = (*package.search_path(top), *ours, os.environ.get("PYTHONPATH", ""))
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",  # some parameters of tests come out of sets
        "TRITON_CACHE_DIR": str(home / "binaries"),
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
        "FORECAST_AUTOTUNE": "1",
        "FORECAST_AUTOTUNE_MODE": "skip",
        "FORECAST_AUTOTUNE_CAPTURE": "values",
        "FORECAST_AUTOTUNE_CACHE_DIR": str(home),
        "FLAGGEMS_CACHE_DIR": str(home / "flag_gems"),
        "XDG_CACHE_HOME": str(home),
        **package.environment,
    }
    text = json.dumps({"package": package.name, "top": str(top), **given})
    return ["-m", "benchmarks.lib.zoo.suite", text], variables


def _capture_package(
    package: Package,
    part: int,
    top: Path,
    shares: list[list[int]],
    until: float,
    options: argparse.Namespace,
) -> str:
    """Capture one part of a package on a share of the cores, which it takes meanwhile."""
    title = f"{package.name} {part + 1}/{package.weight}"
    if time.monotonic() > until:
        return f"{title}: no time was left"
    cores = shares.pop()
    home = options.to.absolute() / f"{package.name}-{part}"
    home.mkdir(parents=True, exist_ok=True)
    given = {"null": options.null, "cores": cores, "part": part, "parts": package.weight}
    words, variables = _suite_command(package, top, home, **given, seconds=options.seconds, seed=options.seed)
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=top / package.name,
            env={**os.environ, **variables},
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(max(1.0, min(options.seconds * 3 + _START_S, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    shares.append(cores)
    return f"{title}: {len(autotuned([home]))} autotuned kernels were captured, status {process.returncode}"


def _judge(options: argparse.Namespace) -> int:
    options.folders = [
        s for f in options.folders for s in (sorted(f.iterdir()) if not (f / CAPTURES).is_dir() else [f])
    ]
    known = [t for t in autotuned(options.folders) if options.match in t.place]
    chosen = random.Random(options.seed).sample(known, min(options.kernels, len(known)))
    options.level = None
    plan = replace(build_plan(options), timed=VARIANT_PLAN.timed)
    say(f"{len(known)} autotuned kernels were captured, {len(chosen)} are judged on {plan.device}")
    report = result_files.ResultFile(options, "zoo-targets", options.seed)
    results = _judged(chosen, plan, options, report)
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


def _judged(
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
