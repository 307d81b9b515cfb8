"""Claim: the forecasts of a model that wrote sources of kernels, blind, choose those worth a measurement.

    python -m benchmarks.search.judged_sources record STORE ... --sources FOLDER --out FOLDER [--seconds 270]

STOREs hold captured calls of programs. FOLDER/KERNEL has sources of one kernel: `NN.py` of a model with its
`forecasts.jsonl`, `mNN.py` of mechanical rewrites. Each is judged once at the captured call, beside the kernel's own
source in its best config, through machine code as `search` does. KERNEL.jsonl in --out gets a line as soon as a source
is judged; what has one already is not judged again. A process for each kernel, some at a time, which take turns on the
device; a model's sources come first, and what is left when time ends is cut. `--null` invents the verdicts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.lib.result_files import say
from forecast_autotune.records import Outcome, digest
from forecast_autotune.store import Store
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.records import (
    FullVerification,
    Node,
    NodeJob,
    NodeResult,
    SearchTarget,
    VerificationJob,
)
from forecast_harness.targets import search_target
from forecast_harness.targets.novelty import node_identity
from forecast_harness.trials.judge_pool import LocalJudgePool
from forecast_harness.trials.protocol import LaneFailure

_TRIALS, _BASE_TRIALS = 6, 64
"""Configs of a source, and of the kernel's own, that may be timed."""
_CLOSE_S = 12.0
"""For a kernel's lanes to end."""
_FACTS = ("configs", "spent", "path", "path_reason", "given_up_after", "codes")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(dest="step", required=True)
    recording = steps.add_parser("record")
    recording.add_argument("stores", nargs="+", type=Path)
    recording.add_argument("--sources", type=Path, required=True)
    recording.add_argument("--out", type=Path, required=True)
    recording.add_argument("--seconds", type=float, default=270.0)
    recording.add_argument("--at-once", type=int, default=3, help="kernels that are judged at a time")
    recording.add_argument("--kernels", nargs="*", default=[], help="only these")
    recording.add_argument(
        "--verify", type=int, default=0, help="fastest of each author that are verified, too"
    )
    recording.add_argument("--null", action="store_true")
    recording.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    return _judge(options) if options.child else _record(options)


# --- recording ---


def _record(options: argparse.Namespace) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    places = {
        call.kernel.name: (store, call.kernel)
        for store in options.stores
        for call, _ in _captures(store)
        if (options.sources / call.kernel.name).is_dir()
    }
    names = [n for n in options.kernels or sorted(places, key=lambda n: _left(options, n), reverse=True)]
    until = time.monotonic() + options.seconds
    say(f"{len(names)} kernels, {sum(_left(options, n) for n in names)} sources are to be judged")
    with ThreadPoolExecutor(options.at_once) as pool:
        for name in pool.map(lambda n: _child(options, n, places[n][0], until), names):
            say(name)
    return 0


def _captures(store: Path) -> Iterator[Any]:
    files = Store(store).captures
    yield from files.every() if files is not None else ()


def _left(options: argparse.Namespace, name: str) -> int:
    known = _rows(options.out / f"{name}.jsonl")
    return sum(digest(p.read_text()) not in known for p in _sources(options.sources / name))


def _sources(folder: Path) -> list[Path]:
    """A model's come first."""
    return sorted(folder.glob("*.py"), key=lambda p: (p.name.startswith("m"), p.name))


def _rows(path: Path) -> dict[str, dict[str, Any]]:
    """Lines by the digest of their source; one that was cut short is none."""
    rows = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows[row["source_sha256"]] = row
    return rows


def _child(options: argparse.Namespace, name: str, store: Path, until: float) -> str:
    """Judge the sources of a kernel in a process of its own, on a share of the cores. Returns a line for a person."""
    left = until - time.monotonic()
    if left < _CLOSE_S:
        return f"{name}: no time was left"
    words = [sys.executable, "-m", "benchmarks.search.judged_sources", "record", str(store)]
    words += ["--sources", str(options.sources), "--out", str(options.out), "--child", name]
    words += ["--seconds", f"{left:.1f}", "--at-once", str(options.at_once), "--verify", str(options.verify)]
    began = time.monotonic()
    environment = {**os.environ, "FORECAST_AUTOTUNE_CACHE_DIR": str(store.absolute())}
    with (options.out / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(
            [*words, *(["--null"] if options.null else [])], stdout=log, stderr=log, env=environment
        )
        try:
            child.wait(left + _CLOSE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    rows = _rows(options.out / f"{name}.jsonl").values()
    gains = [2 ** -r["log2_ratio"] for r in rows if r.get("log2_ratio") is not None]
    text = f"{name}: {len(rows)} lines, {len(gains)} right, best {max(gains, default=0):.2f}x"
    return f"{text}, {time.monotonic() - began:.0f} s, status {child.returncode}"


def _judge(options: argparse.Namespace) -> int:
    """The child: judge the sources of one kernel."""
    until = time.monotonic() + options.seconds - _CLOSE_S
    name, (store,) = options.child, options.stores
    call = max((c for c, _ in _captures(store) if c.kernel.name == name), key=lambda c: c.at)
    place = f"{call.kernel.extra['module']}:{name}@{call.kernel.source_sha256[:12]}"
    if options.null:
        vars(search_target)["cuda_device"] = lambda: call.device
    target, (seed,) = search_target.open_target(place, device="cuda")
    out = options.out / f"{name}.jsonl"
    known = _rows(out)
    nodes = [_node(p, target, seed) for p in _sources(options.sources / name)]
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(_lanes(options, target, seed, Path(folder))) as lanes,
        out.open("a") as file,
    ):

        def write(node: Node, **facts: Any) -> None:
            row = {
                "kernel": name,
                "module": call.kernel.extra["module"],
                "source_sha256": digest(node.source),
            }
            row |= {"author": str(node.provenance.origin), "file": node.provenance.note}
            file.write(json.dumps({**row, **facts}, allow_nan=False) + "\n")
            file.flush()

        base = known.get(digest(seed.source))
        if base is None:
            judged = lanes.submit(_job(target, seed, seed, {}, _BASE_TRIALS)).result(options.seconds)
            base = _facts(judged)
            write(seed, **base, call=[a.to_json() for a in call.arguments], device=target.payload["device"])
        waiting = {
            lanes.submit(_job(target, n, seed, base["config"], _TRIALS)): n
            for n in nodes
            if digest(n.source) not in known
        }
        try:
            for one in as_completed(waiting, timeout=max(0.0, until - time.monotonic())):
                try:
                    write(waiting[one], **_facts(one.result()))
                except LaneFailure as error:
                    say(f"{waiting[one].provenance.note}: lost: {error}")
        except TimeoutError:
            say("some are left")
        fastest = _fastest(nodes, _rows(out), options.verify)
        verdicts = {
            lanes.verify(VerificationJob(f"v{n.id}", n, row["config"], target)): (n, row)
            for n, row in fastest
        }
        try:
            for done in as_completed(verdicts, timeout=max(0.0, until - time.monotonic())):
                verdict, (node, row) = done.result(), verdicts[done]
                seen = {"verified": verdict.is_right, "verify_s": round(verdict.wall_seconds, 2)}
                write(node, **{**row, **seen, "said": verdict.wrong[:400]})
        except (LaneFailure, TimeoutError) as error:
            say(f"not all were verified: {error!r}")
        lanes.give_up()
    return 0


def _fastest(
    nodes: Sequence[Node], rows: Mapping[str, dict[str, Any]], most: int
) -> list[tuple[Node, dict[str, Any]]]:
    """The fastest sources of each author, those that are verified already left out."""
    pairs = [(n, rows[d]) for n in nodes if (d := digest(n.source)) in rows]
    able = sorted((p for p in pairs if (p[1]["log2_ratio"] or 0.0) < 0), key=lambda p: p[1]["log2_ratio"])
    authors = {p[1]["author"] for p in able}
    chosen = [p for a in sorted(authors) for p in [p for p in able if p[1]["author"] == a][:most]]
    return [p for p in chosen if "verified" not in p[1]]


def _node(path: Path, target: SearchTarget, seed: Node) -> Node:
    source, is_model = path.read_text(), not path.name.startswith("m")
    provenance = Provenance(Origin.LLM if is_model else Origin.REWRITE, note=path.name)
    return Node(node_identity(target.id, "triton", source), source, "triton", (seed.id,), provenance)


def _job(target: SearchTarget, node: Node, seed: Node, config: Mapping[str, Any], trials: int) -> NodeJob:
    return NodeJob(digest(node.id, seed.id, trials), node, seed, config, target, 0, trials)


def _facts(judged: NodeResult) -> dict[str, Any]:
    said = "" if judged.outcome is Outcome.OK else judged.feedback[:400]
    return {
        "outcome": str(judged.outcome),
        "stage": judged.stage,
        "log2_ratio": judged.log2_ratio,
        "sd": judged.sd,
        "seconds": dict(judged.seconds),
        "config": dict(judged.config),
        "measurements": judged.measurements,
        "device_s": round(judged.device_seconds, 4),
        "wall_s": round(judged.wall_seconds, 3),
        "said": said,
        **{k: v for k, v in judged.facts.items() if k in _FACTS},
    }


class _InventedJudge:
    """Verdicts of a dry run."""

    def judge(self, job: NodeJob) -> NodeResult:
        chance = random.Random(job.node.id)
        if chance.random() < 0.1:
            return NodeResult(Outcome.INCORRECT, stage="verify", feedback="invented", device_seconds=0.1)
        ratio = 0.0 if job.node.id == job.against.id else chance.gauss(0.0, 0.3)
        config = search_target.configs_for(job.target, job.node.source)[0].to_json()
        return NodeResult(
            Outcome.OK,
            "",
            ratio,
            0.01,
            {"0": 1e-5 * 2**ratio},
            config,
            1,
            device_seconds=0.2,
            wall_seconds=0.3,
        )

    def verify(self, job: VerificationJob) -> FullVerification:
        return FullVerification(Outcome.OK, "", {})

    def close(self) -> None:
        """Holds nothing."""


def _lanes(options: argparse.Namespace, target: SearchTarget, seed: Node, folder: Path) -> LocalJudgePool:
    if options.null:
        return LocalJudgePool(lambda number: _InventedJudge(), 2)  # type: ignore[arg-type,return-value]
    from forecast_harness.trials.devices import verification_plan
    from forecast_harness.trials.machine_lanes import open_machine_code_lanes

    workers = max(2, len(os.sched_getaffinity(0)) // options.at_once)
    return open_machine_code_lanes(
        target,
        seed,
        [verification_plan("cuda")],
        folder=folder,
        workers=workers,
        on_failure=say,
        progress=say,
    )


if __name__ == "__main__":
    sys.exit(main())
