"""Claim: the forecasts of a model that wrote sources of kernels, blind, choose those worth a measurement.

    python -m benchmarks.search.judged_sources record STORE ... --sources FOLDER --out FOLDER [--seconds 270]
    python -m benchmarks.search.judged_sources record STORE ... --sources FOLDER --out FOLDER --live b d f
    python -m benchmarks.search.judged_sources order STORE ... --sources FOLDER --out FOLDER --to DATA
    python -m benchmarks.search.judged_sources replay DATA --out benchmarks/results/judged_sources.json
    python -m benchmarks.search.judged_sources judge STORE ... --sources FOLDER --data DATA --model MODEL --work FOLDER
        --out benchmarks/results/judge_of_sources.json [--steps 60] [--rewarded 2]

STOREs hold captured calls of programs. FOLDER/KERNEL has sources of one kernel: `NN.py` of a model with its
`forecasts.jsonl`, `mNN.py` of mechanical rewrites. Each is judged once at the captured call, beside the kernel's own
source in its best config, through machine code as `search` does. KERNEL.jsonl in --out gets a line as soon as a source
is judged; what has one already is not judged again. A process for each kernel, some at a time, which take turns on the
device; a model's sources come first, and what is left when time ends is cut. `--null` invents the verdicts. With
`--live`, searches of these arms (below) measure what each chooses by its own results so far, until --device-s seconds
of the device are spent by each: live-KERNEL.jsonl, and live.json of all kernels.

`order` works out, from the texts, in which order searches would have measured them, four at a time as `search` chooses:
a) as they were written; b) by the learned surrogate, which hears results; c) by the model's forecasts; d) by both, by
their precisions, the model's spread stretched by its errors so far; e) mechanical ones by b; f) all of them by d, or b
where the model said nothing. It writes DATA, which holds no texts. `replay` computes figures of it, and of r) a random
order of the model's (mean of many); intervals are of means over kernels, drawn anew.

`judge` trains a small language model on a model's sources of all libraries but one, to forecast as `search` asks it
(SFT, then GRPO with the calibration reward), and asks it about that one's. Beside it: the surrogate as it is, and with
the others' verdicts; the author's own forecasts; the others' mean. `weight` is what `train calibrate-llm` would give.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from benchmarks.lib.result_files import ResultFile, say
from forecast_autotune.llm import prompt
from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.prompt import Prompt
from forecast_autotune.llm.providers import provider
from forecast_autotune.records import Outcome, digest
from forecast_autotune.records.captured_call import CapturedCall
from forecast_autotune.store import Store
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.records import (
    FullVerification,
    Node,
    NodeForecast,
    NodeJob,
    NodeResult,
    SearchTarget,
    VerificationJob,
)
from forecast_harness.search.acquisition import choose_by_forecast
from forecast_harness.search.events import NodeForecastRequest
from forecast_harness.search.forecasters import (
    LineageForecaster,
    TritonForecaster,
    blend_forecast,
    failure_probabilities,
    question_prompt,
    relative_forecasts,
    static_features,
)
from forecast_harness.targets import search_target
from forecast_harness.targets.novelty import node_identity
from forecast_harness.trials.judge_pool import LocalJudgePool
from forecast_harness.trials.protocol import LaneFailure
from forecast_train.llm.calibration.answers import ModelAnswers
from forecast_train.llm.data.examples import Example, ExampleCandidate, ExampleOrigin, write_examples
from forecast_train.llm.runs import LoraSettings
from forecast_train.metrics import bin_sums, ece_of, spearman

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
    recording, ordering = steps.add_parser("record"), steps.add_parser("order")
    for one in (recording, ordering):
        one.add_argument("stores", nargs="+", type=Path)
        one.add_argument("--sources", type=Path, required=True)
        one.add_argument("--out", type=Path, required=True)
        one.add_argument("--kernels", nargs="*", default=[], help="only these")
    recording.add_argument("--seconds", type=float, default=270.0)
    recording.add_argument("--at-once", type=int, default=3, help="kernels that are judged at a time")
    recording.add_argument("--verify", type=int, default=0, help="fastest of each author to verify, too")
    recording.add_argument("--live", nargs="*", default=[], help="arms that search, one after the other")
    recording.add_argument("--device-s", type=float, default=1.0, help="seconds on the device, an arm")
    recording.add_argument("--null", action="store_true")
    recording.add_argument("--child", default="", help=argparse.SUPPRESS)
    ordering.add_argument("--to", type=Path, required=True)
    replaying = steps.add_parser("replay")
    replaying.add_argument("data", type=Path)
    replaying.add_argument("--out", type=Path, required=True)
    training = steps.add_parser("judge")
    training.add_argument("stores", nargs="+", type=Path)
    for name in ("--sources", "--data", "--model", "--work", "--out"):
        training.add_argument(name, required=True, type=Path)
    training.add_argument("--libraries", nargs="*", default=[], help="only these are left out")
    training.add_argument("--chars", type=int, default=600, help="that are shown of a source, change or task")
    training.add_argument("--tokens", type=int, default=2560, help="of a sequence")
    training.add_argument("--steps", type=int, default=60, help="of supervised training, a library")
    training.add_argument("--rewarded", type=int, default=2, help="steps by rewards after them")
    options = parser.parse_args()
    if options.step == "record" and options.child:
        return _judge(options)
    return {"record": _record, "order": _order, "replay": _replay, "judge": _train_judge}[options.step](
        options
    )


# --- recording ---


def _record(options: argparse.Namespace) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    places = _places(options)
    names = sorted(
        (n for n in places if options.verify or options.live or _left(options, n)),
        key=lambda n: -_left(options, n),
    )
    until = time.monotonic() + options.seconds
    left = sum(_left(options, n) for n in names)
    # Kernels whose arms search later have as long.
    share = options.seconds / max(1, math.ceil(len(names) / options.at_once)) if options.live else math.inf
    say(f"{len(names)} kernels, {left} sources are to be judged, arms {options.live} are to search")
    with ThreadPoolExecutor(options.at_once) as pool:
        for line in as_completed([pool.submit(_child, options, n, places[n], until, share) for n in names]):
            say(line.result())
            if options.live:
                _report_live(options, names)
    return 0


def _places(options: argparse.Namespace) -> dict[str, Path]:
    """The store of each kernel that has sources."""
    every = {c.kernel.name: store for store in options.stores for c, _ in _captures(store)}
    return {n: every[n] for n in options.kernels or every if (options.sources / n).is_dir()}


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
    return {row["source_sha256"]: row for row in _lines(path)}


def _lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def _child(options: argparse.Namespace, name: str, store: Path, until: float, share: float) -> str:
    """Judge the sources of a kernel in a process of its own, on a share of the cores. Returns a line for a person."""
    left = min(until - time.monotonic(), share)
    if left < _CLOSE_S:
        return f"{name}: no time was left"
    words = [sys.executable, "-m", "benchmarks.search.judged_sources", "record", str(store)]
    words += ["--sources", str(options.sources), "--out", str(options.out), "--child", name]
    words += ["--seconds", f"{left:.1f}", "--at-once", str(options.at_once), "--verify", str(options.verify)]
    words += ["--device-s", str(options.device_s), *(["--live", *options.live] if options.live else [])]
    began, kind = time.monotonic(), "live-" if options.live else ""
    environment = {**os.environ, "FORECAST_AUTOTUNE_CACHE_DIR": str(store.absolute())}
    with (options.out / f"{kind}{name}.log").open("wb") as log:
        child = subprocess.Popen(
            [*words, *(["--null"] if options.null else [])], stdout=log, stderr=log, env=environment
        )
        try:
            child.wait(left + _CLOSE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    rows = _lines(options.out / f"{kind}{name}.jsonl")
    gains = [2 ** -r["log2_ratio"] for r in rows if r.get("log2_ratio") is not None]
    text = f"{name}: {len(rows)} lines, {len(gains)} right, best {max(gains, default=0):.2f}x"
    return f"{text}, {time.monotonic() - began:.0f} s, status {child.returncode}"


def _judge(options: argparse.Namespace) -> int:
    """The child: judge the sources of one kernel."""
    until = time.monotonic() + options.seconds - _CLOSE_S
    name, (store,) = options.child, options.stores
    call, target, seed = _opened(name, store, real=not options.null)
    out, module = options.out / f"{name}.jsonl", call.kernel.extra["module"]
    known = _rows(out)
    nodes = [_node(p, target, seed) for p in _sources(options.sources / name)]
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(_lanes(options, target, seed, Path(folder))) as lanes,
        out.open("a") as file,
    ):

        def write(node: Node, facts: Mapping[str, Any]) -> None:
            row = {"kernel": name, "module": module, "source_sha256": digest(node.source)}
            row |= {"author": str(node.provenance.origin), "file": node.provenance.note, **facts}
            file.write(json.dumps(row, allow_nan=False) + "\n")
            file.flush()

        base = known.get(digest(seed.source))
        if base is None:
            judged = lanes.submit(_job(target, seed, seed, {}, _BASE_TRIALS)).result(options.seconds)
            base = _facts(judged)
            shown = {"call": [a.to_json() for a in call.arguments], "device": target.payload["device"]}
            write(seed, {**base, **shown})
        if options.live:
            _search_live(options, lanes, _Arms(target, seed, nodes, _said(options, name)), base, until)
            return 0
        waiting = {
            lanes.submit(_job(target, n, seed, base["config"], _TRIALS)): n
            for n in nodes
            if digest(n.source) not in known
        }
        try:
            for one in as_completed(waiting, timeout=max(0.0, until - time.monotonic())):
                try:
                    write(waiting[one], _facts(one.result()))
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
                write(node, {**row, **seen, "said": verdict.wrong[:400]})
        except (LaneFailure, TimeoutError) as error:
            say(f"not all were verified: {error!r}")
        lanes.give_up()
    return 0


def _search_live(
    options: argparse.Namespace, lanes: LocalJudgePool, arms: _Arms, base: dict[str, Any], until: float
) -> None:
    """Search by each arm in its turn, on an equal share of the time that is left."""
    name = options.child
    with closing(arms.learned), (options.out / f"live-{name}.jsonl").open("w") as file:
        arms.rows = {"base": base}
        arms.by_surrogate(list(arms.nodes), [])  # traces all, so that no arm waits for it
        for number, arm in enumerate(options.live):
            began = time.monotonic()
            limit = began + (until - began) / (len(options.live) - number)
            arms.rows, spent, files = {"base": base}, 0.0, arms.files(arm)
            while (left := [f for f in files if f not in arms.rows]) and spent < options.device_s:
                done = [f for f in arms.rows if f != "base"]
                chosen = _chosen(left, done, arms.beliefs(arm), name)
                jobs = {
                    lanes.submit(_job(arms.target, arms.nodes[f], arms.seed, base["config"], _TRIALS, arm)): f
                    for f in chosen
                }
                try:
                    for one in as_completed(jobs, max(0.0, limit - time.monotonic())):
                        row = {"arm": arm, "file": jobs[one], **_facts(one.result())}
                        arms.rows[jobs[one]] = row
                        spent += row["device_s"]
                        file.write(json.dumps(row, allow_nan=False) + "\n")
                        file.flush()
                except (LaneFailure, TimeoutError) as error:
                    say(f"{arm}: ended early: {error!r}")
                    lanes.give_up()
                    break
            took = time.monotonic() - began
            say(f"{arm}: {len(arms.rows) - 1} measured, {spent:.2f} s on the device, {took:.0f} s in all")


def _opened(name: str, store: Path, *, real: bool) -> tuple[CapturedCall, SearchTarget, Node]:
    call = max((c for c, _ in _captures(store) if c.kernel.name == name), key=lambda c: c.at)
    os.environ["FORECAST_AUTOTUNE_CACHE_DIR"] = str(store.absolute())
    if not real:
        vars(search_target)["cuda_device"] = lambda: call.device
    place = f"{call.kernel.extra['module']}:{name}@{call.kernel.source_sha256[:12]}"
    target, (seed,) = search_target.open_target(place, device="cuda")
    return call, target, seed


def _fastest(
    nodes: Sequence[Node], rows: Mapping[str, dict[str, Any]], most: int
) -> list[tuple[Node, dict[str, Any]]]:
    """The fastest sources of each author, those that are verified already left out."""
    pairs = [(n, rows[d]) for n in nodes if (d := digest(n.source)) in rows]
    able = [p for p in pairs if (p[1]["log2_ratio"] or 0.0) < 0 and p[1].get("verified") is not False]
    able.sort(key=lambda p: p[1]["log2_ratio"])
    authors = {p[1]["author"] for p in able}
    chosen = [p for a in sorted(authors) for p in [p for p in able if p[1]["author"] == a][:most]]
    return [p for p in chosen if "verified" not in p[1]]


def _node(path: Path, target: SearchTarget, seed: Node) -> Node:
    source, is_model = path.read_text(), not path.name.startswith("m")
    provenance = Provenance(Origin.LLM if is_model else Origin.REWRITE, note=path.name)
    return Node(node_identity(target.id, "triton", source), source, "triton", (seed.id,), provenance)


def _job(
    target: SearchTarget, node: Node, seed: Node, config: Mapping[str, Any], trials: int, arm: str = ""
) -> NodeJob:
    return NodeJob(digest(node.id, seed.id, trials, arm), node, seed, config, target, 0, trials)


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
        chance, is_base = random.Random(job.node.id), job.node.id == job.against.id
        if chance.random() < 0.1 and not is_base:
            return NodeResult(Outcome.INCORRECT, stage="verify", feedback="invented", device_seconds=0.1)
        ratio = 0.0 if is_base else chance.gauss(0.0, 0.3)
        config = search_target.configs_for(job.target, job.node.source)[0].to_json()
        return NodeResult(Outcome.OK, "", ratio, 0.01, {"0": 2**ratio}, config, 1, device_seconds=0.2)

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
    plans = [verification_plan("cuda")]
    return open_machine_code_lanes(target, seed, plans, folder=folder, workers=workers, on_failure=say)


# --- in which order ---

_SLOTS, _AUDIT, _PRIOR = 4, 0.1, 4.0
"""Sources that are chosen at a time, audits among them, and results that the model's stated spread counts for."""


def _order(options: argparse.Namespace) -> int:
    with gzip.GzipFile(options.to, "wb", mtime=0) as file:
        for name, store in sorted(_places(options).items()):
            for row in _ordered(options, name, store):
                file.write(json.dumps(row, sort_keys=True).encode() + b"\n")
            say(name)
    return 0


def _ordered(options: argparse.Namespace, name: str, store: Path) -> list[dict[str, Any]]:
    """The rows of a kernel, each with its place in the arms that have it."""
    _, target, seed = _opened(name, store, real=False)
    judged = _rows(options.out / f"{name}.jsonl").values()
    rows = {r["file"]: {k: v for k, v in r.items() if k not in ("said", "configs")} for r in judged}
    for row in (r for r in rows.values() if r.get("verified") is False):
        row |= {"outcome": str(Outcome.INCORRECT), "log2_ratio": None, "unverified": row["log2_ratio"]}
    paths = [p for p in _sources(options.sources / name) if p.name in rows]
    arms = _Arms(target, seed, [_node(p, target, seed) for p in paths], _said(options, name))
    arms.rows |= rows
    with closing(arms.learned):
        for file, belief in arms.by_surrogate(list(arms.nodes), []).items():
            seen = static_features([(arms.nodes[file], seed)])[0]
            rows[file] |= {
                "learned": [belief.mean, belief.sd, belief.p_fail],
                "features": [*map(float, seen)],
            }
            if file in arms.said:
                rows[file]["said"] = arms.said[file]
        for arm in "abcdef":
            for place, file in enumerate(_measured(arms.files(arm), arms.beliefs(arm), name)):
                rows[file].setdefault("places", {})[arm] = place
    return list(rows.values())


def _said(options: argparse.Namespace, name: str) -> dict[str, list[float]]:
    """A model's forecasts (log2 ratio, its standard deviation, probability of being right) by file."""
    rows = _lines(options.sources / name / "forecasts.jsonl")
    return {r["file"]: [r["forecast_log2_ratio"], r["sd"], r["p_correct"]] for r in rows}


class _Arms:
    """What searches of a kernel believe of its sources, by the rows of those that were measured."""

    def __init__(
        self, target: SearchTarget, seed: Node, nodes: Sequence[Node], said: Mapping[str, list[float]]
    ) -> None:
        self.target, self.seed, self.learned = target, seed, TritonForecaster(target)
        self.nodes = {n.provenance.note: n for n in nodes}
        self.said = {f: v for f, v in said.items() if f in self.nodes}
        self.rows: dict[str, dict[str, Any]] = {}

    def files(self, arm: str) -> list[str]:
        """Those that an arm chooses from, in the order in which they were written."""
        made = [f for f in self.nodes if f not in self.said]
        model = [f for f in self.nodes if f in self.said]
        return {"e": made, "f": [*model, *made]}.get(arm, model)

    def beliefs(self, arm: str) -> Any:
        """The function that an arm asks; None: it takes what comes first."""
        by_surrogate, both = self.by_surrogate, self.by_both
        return {"b": by_surrogate, "c": self.by_model, "d": both, "e": by_surrogate, "f": both}.get(arm)

    def by_surrogate(self, files: Sequence[str], done: Sequence[str]) -> Mapping[str, NodeForecast]:
        rows, nodes, seed = self.rows, self.nodes, self.seed
        best = min([f for f in done if _right(rows[f])], key=lambda f: rows[f]["log2_ratio"], default="")
        reference = nodes[best] if best and rows[best]["log2_ratio"] < 0 else seed
        known = [(seed, _result(rows["base"]), 0.0)]
        known += [(nodes[f], _result(rows[f]), rows[f]["log2_ratio"] or 0.0) for f in done]
        request = NodeForecastRequest(0, reference, tuple(nodes[f] for f in files), tuple(known), self.target)
        beliefs = self.learned.forecast(request).beliefs
        return {f: beliefs[nodes[f].id] for f in files}

    def by_model(self, files: Sequence[str], done: Sequence[str]) -> dict[str, NodeForecast]:
        rows, said = self.rows, self.said
        heard = [(rows[f]["log2_ratio"], *said[f]) for f in done if _right(rows[f]) and f in said]
        squares = [((measured - mean) / sd) ** 2 for measured, mean, sd, _ in heard]
        stretch = math.sqrt((_PRIOR + sum(squares)) / (_PRIOR + len(squares)))
        lead = min([0.0, *(rows[f]["log2_ratio"] for f in done if _right(rows[f]))])
        stated = {f: said[f] for f in files if f in said}
        return {f: _belief(mean - lead, sd * stretch, 1 - p) for f, (mean, sd, p) in stated.items()}

    def by_both(self, files: Sequence[str], done: Sequence[str]) -> dict[str, NodeForecast]:
        beliefs, model = dict(self.by_surrogate(files, done)), self.by_model(files, done)
        return beliefs | {f: _blended(beliefs[f], said) for f, said in model.items()}


def _measured(files: Sequence[str], believe: Any, seed: str) -> list[str]:
    """The order in which these are measured."""
    done: list[str] = []
    while left := [f for f in files if f not in done]:
        done += _chosen(left, done, believe, seed)
    return done


def _chosen(left: Sequence[str], done: Sequence[str], believe: Any, seed: str) -> Sequence[str]:
    """Those that are measured next."""
    if believe is None:
        return left[:_SLOTS]
    beliefs = believe(left, done)
    chosen = choose_by_forecast(len(done), left, beliefs, slots=_SLOTS, audit=_AUDIT, seed=seed).nodes
    return chosen or left[:_SLOTS]


def _right(row: Mapping[str, Any]) -> bool:
    return row["log2_ratio"] is not None


def _result(row: Mapping[str, Any]) -> NodeResult:
    return NodeResult(Outcome(row["outcome"]), log2_ratio=row["log2_ratio"], sd=row["sd"])


def _belief(mean: float, sd: float, p_fail: float) -> NodeForecast:
    return NodeForecast(mean, sd, p_fail, (1 - p_fail) * 0.5 * math.erfc(mean / (sd * math.sqrt(2))))


def _blended(before: NodeForecast, said: NodeForecast) -> NodeForecast:
    own = 0.0 if before.abstains else before.sd**-2
    precision = own + said.sd**-2
    mean = (before.mean * own + said.mean * said.sd**-2) / precision
    return _belief(mean, precision**-0.5, 1 - (1 - before.p_fail) * (1 - said.p_fail))


# --- what they show ---

_AUTHORS, _SHARES = (str(Origin.LLM), str(Origin.REWRITE)), (0.125, 0.25, 0.5, 1.0)
_FASTER, _DRAWS, _SHUFFLES = math.log2(1.05), 4000, 400
"""How much faster counts (log2), resamples of kernels, and random orders."""


def _replay(options: argparse.Namespace) -> int:
    kernels = _read_data(options.data)
    rows = [r for listed in kernels.values() for r in listed]
    report = ResultFile(options, "judged-sources", 0)
    curves = {n: _curves(listed) for n, listed in kernels.items()}
    for name, listed in kernels.items():
        report.add("kernels", {"kernel": name, "module": listed[0]["module"], **curves[name]})
    model = {n: [r for r in listed if "a" in r.get("places", {})] for n, listed in kernels.items()}
    whole = [r for listed in model.values() for r in listed]
    ended = {n: c["e"]["seconds"][-1] for n, c in curves.items()}
    behind = {n: _gain_at(curves[n]["f"], s) - curves[n]["e"]["gain"][-1] for n, s in ended.items()}
    report.finish(
        {
            "kernels": len(kernels),
            "sources": {a: sum(r["author"] == a for r in rows if "places" in r) for a in _AUTHORS},
            "right": {a: _share([_right(r) for r in rows if r["author"] == a]) for a in _AUTHORS},
            "best": {a: _interval([c[a]["gain"][-1] for c in curves.values()]) for a in "aef"},
            "device_s": sum(r["device_s"] for r in rows),
            "at_share": {str(s): _ahead(curves, _at_share, s) for s in _SHARES},
            "at_share_of_seconds": {str(s): _ahead(curves, _at_seconds, s) for s in _SHARES},
            "considered_per_measured": {a: _considered(curves, a) for a in "ar"},
            "f_behind_e": {n: g for n, g in behind.items() if g < 0},
            "best_tenth": {k: _best_tenth(model, k) for k in ("said", "learned", "")},
            "forecasts": {k: _scores(whole, k) for k in ("said", "learned")},
            "verified": {
                a: [r["verified"] for r in rows if "verified" in r and r["author"] == a] for a in _AUTHORS
            },
        }
    )
    return 0


def _read_data(path: Path) -> dict[str, list[dict[str, Any]]]:
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    return {n: [r for r in rows if r["kernel"] == n] for n in dict.fromkeys(r["kernel"] for r in rows)}


def _curves(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By arm: the best log2 gain, and the seconds on the device, after each measurement."""
    arms = {a: [r for r in rows if a in r.get("places", {})] for a in "abcdef"}
    curves = {a: _curve(sorted(r, key=lambda one: one["places"][a])) for a, r in arms.items()}
    drawn = [_curve(random.Random(n).sample(arms["a"], len(arms["a"]))) for n in range(_SHUFFLES)]
    curves["r"] = {
        k: [statistics.fmean(v) for v in zip(*(c[k] for c in drawn), strict=True)] for k in drawn[0]
    }
    return curves


def _report_live(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Write what the arms have gained at equal seconds on the device, as far as kernels have been searched by all."""
    report = ResultFile(
        argparse.Namespace(**{**vars(options), "out": options.out / "live.json"}), "live-arms"
    )
    equal: dict[str, dict[str, list[float]]] = {str(s): {a: [] for a in options.live} for s in _SHARES}
    for name in names:
        rows = _lines(options.out / f"live-{name}.jsonl")
        curves = {a: _curve([r for r in rows if r["arm"] == a]) for a in options.live}
        if not all(c["gain"] for c in curves.values()):
            continue
        seconds = min(options.device_s, *(c["seconds"][-1] for c in curves.values()))
        report.add("kernels", {"kernel": name, "seconds": seconds, **curves})
        for share, gains in equal.items():
            for arm, curve in curves.items():
                gains[arm].append(_gain_at(curve, float(share) * seconds))
    if any(equal["1.0"].values()):
        summary: dict[str, dict[str, Any]] = {}
        for share, gains in equal.items():
            summary[share] = {arm: _interval(values) for arm, values in gains.items()}
            for one, other in itertools.combinations(options.live, 2):
                ahead = [x - y for x, y in zip(gains[other], gains[one], strict=True)]
                summary[share][f"{other} - {one}"] = _interval(ahead)
        report.finish(summary)


def _curve(order: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    gains, seconds = [_gain(r) for r in order], [r["device_s"] for r in order]
    return {"gain": [*itertools.accumulate(gains, max)], "seconds": [*itertools.accumulate(seconds)]}


def _gain(row: Mapping[str, Any]) -> float:
    return max(0.0, -(row["log2_ratio"] or 0.0))


def _gain_at(curve: Mapping[str, Sequence[float]], seconds: float) -> float:
    return max((g for g, s in zip(curve["gain"], curve["seconds"], strict=True) if s <= seconds), default=0.0)


def _at_share(curves: Mapping[str, Any], arm: str, share: float) -> float:
    """The gain of an arm of one kernel after this share of its measurements."""
    gains: Sequence[float] = curves[arm]["gain"]
    return gains[max(1, round(share * len(gains))) - 1]


def _at_seconds(curves: Mapping[str, Any], arm: str, share: float) -> float:
    """The gain after this share of the seconds that all sources of the model take."""
    return _gain_at(curves[arm], share * curves["a"]["seconds"][-1])


def _ahead(curves: Mapping[str, Any], gain: Any, share: float) -> dict[str, Any]:
    """Mean log2 gains over kernels by arm, and how far d is ahead of others."""
    gains = {a: [gain(c, a, share) for c in curves.values()] for a in "abcdefr"}
    ahead = {a: _interval([x - y for x, y in zip(gains["d"], gains[a], strict=True)]) for a in "abcr"}
    return {"gain": {a: _interval(g) for a, g in gains.items()}, "d_ahead_of": ahead}


def _considered(curves: Mapping[str, Any], arm: str) -> dict[str, float]:
    """Measurements in an arm until the gain that d has after a quarter, over that quarter."""
    ratios = []
    for c in curves.values():
        n = max(1, round(len(c["d"]["gain"]) / 4))
        wanted = c["d"]["gain"][n - 1]
        ratios.append(next(i for i, g in enumerate([*c[arm]["gain"], math.inf], 1) if g >= wanted) / n)
    return _interval(ratios)


def _best_tenth(model: Mapping[str, Sequence[dict[str, Any]]], key: str) -> float:
    """Share of kernels where the best-ranked tenth of the sources holds one within 20 % of the best ('': any tenth)."""
    held = []
    for rows in model.values():
        n, best = math.ceil(len(rows) / 10), max(map(_gain, rows))
        near = [_right(r) and -r["log2_ratio"] >= best - math.log2(1.2) for r in rows]
        order = sorted(range(len(rows)), key=lambda i: rows[i][key][0] if key else 0.0)
        tops = [order[:n]] if key else [random.Random(s).sample(order, n) for s in range(_SHUFFLES)]
        held.append(statistics.fmean(any(near[i] for i in top) for top in tops))
    return statistics.fmean(held)


def _best_place(model: Mapping[str, Sequence[dict[str, Any]]], key: str) -> float:
    """The share of a kernel's sources that a forecast ranks before the fastest, ties halved; mean over kernels."""
    shares = []
    for rows in model.values():
        best = min((r for r in rows if _right(r)), key=lambda r: r["log2_ratio"])
        ahead = [
            0.5 * ((r[key][0] < best[key][0]) + (r[key][0] <= best[key][0])) for r in rows if r is not best
        ]
        shares.append(statistics.fmean(ahead))
    return statistics.fmean(shares)


def _scores(rows: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    """Errors, reliability and selection of forecasts (mean, sd, and a probability of being right or of failing)."""
    right = [r for r in rows if _right(r)]
    z = [(r["log2_ratio"] - r[key][0]) / r[key][1] for r in right]
    p = [_p_right(r, key) * 0.5 * math.erfc((r[key][0] + _FASTER) / (r[key][1] * math.sqrt(2))) for r in rows]
    faster = [_right(r) and r["log2_ratio"] <= -_FASTER for r in rows]
    named = [r[key][0] <= -_FASTER for r in rows]
    sure = sorted(zip(p, faster, strict=True), key=lambda one: -abs(one[0] - 0.5))
    wrong = [(q >= 0.5) is not is_faster for q, is_faster in sure]
    risks = [sum(wrong[:n]) / n for n in range(1, len(wrong) + 1)]
    hits = sum(n and f for n, f in zip(named, faster, strict=True))
    return {
        "log_score": -statistics.fmean(
            0.5 * x * x + math.log(r[key][1] * math.sqrt(2 * math.pi)) for x, r in zip(z, right, strict=True)
        ),
        "within_sd": _share([abs(x) <= 1 for x in z]),
        "within_two_sd": _share([abs(x) <= 2 for x in z]),
        "bias": statistics.fmean(r["log2_ratio"] - r[key][0] for r in right),
        "rank_correlation": spearman(
            np.array([r[key][0] for r in right]), np.array([r["log2_ratio"] for r in right])
        ),
        "ece": ece_of(bin_sums(np.array(p), np.array(faster))),
        "aurc": statistics.fmean(risks),
        "risk": risks[-1],
        "risk_at_half": risks[len(risks) // 2 - 1],
        "faster": _share(faster),
        "precision": hits / max(1, sum(named)),
        "recall": hits / max(1, sum(faster)),
        "p_right": statistics.fmean(_p_right(r, key) for r in rows),
    }


def _p_right(row: Mapping[str, Any], key: str) -> float:
    """The author states this; all others the probability of failing."""
    return float(row[key][2] if key == "said" else 1 - row[key][2])


def _share(values: Sequence[bool]) -> float:
    return sum(values) / max(1, len(values))


def _interval(values: Sequence[float]) -> dict[str, float]:
    chance = random.Random(0)
    means = sorted(statistics.fmean(chance.choices(values, k=len(values))) for _ in range(_DRAWS))
    low, high = means[int(0.025 * _DRAWS)], means[int(0.975 * _DRAWS)]
    return {"mean": statistics.fmean(values), "low": low, "high": high}


# --- a small model as the judge ---

_JUDGES = ("learned", "taught", "said", "prior", "trained", "rewarded", "corrected", "blend")
_PATIENCE_S = 1800.0


@dataclass(frozen=True)
class _Kernel:
    """A kernel, the sources that a model wrote of it, their rows, and the question that `search` asks about them."""

    rows: list[dict[str, Any]]
    request: NodeForecastRequest
    prompt: Prompt

    @property
    def library(self) -> str:
        return str(self.rows[0]["module"]).partition(".")[0]

    def example(self) -> Example:
        listed = [
            ExampleCandidate(text, r["file"], "", r["outcome"], _ratio(r), r["sd"], math.nan)
            for text, r in zip(self.prompt.suffixes, self.rows, strict=True)
        ]
        name, (seed, base, _) = self.rows[0]["kernel"], self.request.judged[0]
        origin = ExampleOrigin(name, name, self.library, "llm", "", digest(seed.source), "")
        milliseconds = math.log2(base.seconds["0"] * 1e3)
        return Example(origin, self.prompt.version, self.prompt.prefix, milliseconds, True, 0, tuple(listed))

    def verdicts(self) -> list[tuple[Node, NodeResult, float]]:
        pairs = zip(self.request.nodes, self.rows, strict=True)
        return [*self.request.judged, *((n, _result(r), r["log2_ratio"] or 0.0) for n, r in pairs)]


def _ratio(row: Mapping[str, Any]) -> float:
    return row["log2_ratio"] if _right(row) else math.nan


def _train_judge(options: argparse.Namespace) -> int:
    from forecast_train.llm.calibration.fit import fit_calibration, fit_corrections

    data = _read_data(options.data)
    options.kernels = list(data)
    vars(prompt).update(MAX_SOURCE_CHARS=options.chars, MAX_DIFF_CHARS=options.chars)
    kernels = [_questions_of(options, n, store, data[n]) for n, store in sorted(_places(options).items())]
    report, answers, runs = ResultFile(options, "judged-sources", 0), [], {}
    for library in options.libraries or sorted({k.library for k in kernels}):
        training, held_out = ([k for k in kernels if (k.library == library) is out] for out in (False, True))
        specs, runs[library] = _train(options, library, [k.example() for k in training])
        for k in held_out:
            _forecast_before(k, training)
            heard = {spec: _ask(options.work, spec, k) for spec in dict.fromkeys(specs.values())}
            for key, spec in specs.items():
                answers.append((key, k, heard[spec]))
                report.add("answers", {"judge": key, **heard[spec].to_json()})
        say(f"{library}: {len(held_out)} kernels were asked about")
    weights = {}
    for key in ("trained", "rewarded"):
        mine = [(k, a) for one, k, a in answers if one == key]
        for k, a in mine:
            apart = [b for _, b in mine if b.family != a.family]
            corrected = fit_corrections(apart).moments(a.stated) if apart else BINS.moments(a.stated)
            for r, *raw, mean, sd, fails in zip(k.rows, *BINS.moments(a.stated), *corrected, strict=True):
                r[key], r["corrected"] = [*map(float, raw)], [float(mean), float(sd), float(fails)]
                blend = blend_forecast(_belief(*r["learned"]), *r[key])
                r["blend"] = [blend.mean, blend.sd, blend.p_fail]
        if len(runs) > 2:
            fitted = fit_calibration([a for _, a in mine])
            weights[key] = {"weight": fitted.weight.mean, "nats": fitted.about["log_score"]}
    done = {k.rows[0]["kernel"]: k.rows for k in kernels if "blend" in k.rows[0]}
    report.put(
        "sources", [{n: r[n] for n in ("kernel", "file", *_JUDGES)} for rows in done.values() for r in rows]
    )
    scores, each = {}, {}
    for j in _JUDGES:
        each[j] = [_scores(rows, j)["log_score"] for rows in done.values()]
        scores[j] = _scores([r for rows in done.values() for r in rows], j)
        scores[j] |= {"best_tenth": _best_tenth(done, j), "best_place": _best_place(done, j)}
    ahead = {j: _interval([a - b for a, b in zip(each["corrected"], each[j], strict=True)]) for j in _JUDGES}
    about = {"kernels": len(done), "sources": sum(map(len, done.values())), "weights": weights, "runs": runs}
    report.finish({**about, "scores": scores, "corrected_ahead_of": ahead})
    return 0


def _questions_of(options: argparse.Namespace, name: str, store: Path, rows: list[dict[str, Any]]) -> _Kernel:
    _, target, seed = _opened(name, store, real=False)
    base, written = next(r for r in rows if r["file"] == "base"), [r for r in rows if "said" in r]
    nodes = [_node(options.sources / name / r["file"], target, seed) for r in written]
    # Names of files tell in which order they were written.
    shown = tuple(replace(n, provenance=replace(n.provenance, note="a language model")) for n in nodes)
    result = NodeResult(Outcome.OK, log2_ratio=0.0, seconds=base["seconds"])
    target = replace(target, statement=target.statement[: options.chars])
    request = NodeForecastRequest(0, seed, shown, ((seed, result, 0.0),), target)
    return _Kernel(written, request, question_prompt(request))


def _train(options: argparse.Namespace, library: str, examples: list[Example]) -> tuple[dict[str, str], Any]:
    """Train without a library: specifications of the models, and what their training did."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from forecast_train.llm import grpo, sft
    from forecast_train.llm.settings import ScheduleSettings, SftRun

    work, model = options.work / library, str(options.model)
    (work / "data").mkdir(parents=True, exist_ok=True)
    write_examples(work / "data" / "train.parquet", examples)
    write_examples(work / "data" / "validation.parquet", [])
    steps = ScheduleSettings(most=options.steps, rate=5e-4, examples=1, tokens=options.tokens, save=10_000)
    run = SftRun(model, str(work / "data"), str(work / "sft"), lora=LoraSettings(16, 32), steps=steps)
    began = time.monotonic()
    done = sft.train(run, resume=True)
    losses = [r["loss"] for r in done["log"] if "loss" in r]
    say(
        f"{library}: {len(losses)} steps, loss {losses[0]:.2f} to {losses[-1]:.2f}, {time.monotonic() - began:.0f} s"
    )
    whole, adapter = work / "whole", work / "sft" / "trained"
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    PeftModel.from_pretrained(base, str(adapter)).merge_and_unload().save_pretrained(str(whole))
    AutoTokenizer.from_pretrained(model).save_pretrained(str(whole))
    rollouts = grpo.RolloutSettings(generations=4, prompts=1, tokens=48)
    settings = {"steps": options.rewarded, "save": 10_000, "lora": LoraSettings(16, 32), "rollouts": rollouts}
    rewarded = grpo.train(
        grpo.GrpoRun(str(whole), str(work / "data"), str(work / "grpo"), **settings), resume=True
    )
    say(f"{library}: rewarded after {time.monotonic() - began:.0f} s")
    about = {"examples": sum(len(e.candidates) for e in examples), "tokens": done["tokens"]["train"]}
    for column in ("rewards/parsed/mean", "reward"):
        about[column] = [r[column] for r in rewarded["log"] if column in r]
    about["losses"] = losses
    before = f"transformers:{model}?adapter={quote(str(adapter))}"
    after = f"transformers:{whole}?adapter={quote(str(work / 'grpo' / 'trained'))}"
    # Replies that all earn the same leave the weights as they are.
    moved = any(r.get("grad_norm") for r in rewarded["log"])
    return {"trained": before, "rewarded": after if moved else before}, about


def _ask(work: Path, spec: str, kernel: _Kernel) -> ModelAnswers:
    """Ask a model about the sources of a kernel, once."""
    asked, began = kernel.prompt, time.monotonic()
    kept = work / f"{digest(spec, asked.prefix, asked.suffixes)}.json"
    if kept.exists():
        return ModelAnswers.from_json(json.loads(kept.read_text()))
    with closing(provider().backend(spec)) as backend:
        answer = backend.forecast(asked.prefix, asked.suffixes, asked.labels, timeout_s=_PATIENCE_S)
    stated = np.asarray(answer.probabilities, float)
    stated /= stated.sum(axis=1, keepdims=True)
    name, n, ratios = kernel.rows[0]["kernel"], len(stated), np.array([_ratio(r) for r in kernel.rows])
    learned = np.array([r["learned"][0] for r in kernel.rows])
    answers = ModelAnswers(
        *(name, name, name, kernel.library, "", "triton", learned, ratios, np.arange(n), stated, answer.mass),
        *(ratios, "", 0.0, "judge", asked.version, len(asked.prefix) + max(map(len, asked.suffixes)), 0),
        time.monotonic() - began,
    )
    kept.write_text(json.dumps(answers.to_json()))
    return answers


def _forecast_before(kernel: _Kernel, others: Sequence[_Kernel]) -> None:
    """Forecasts of a kernel's sources by the other libraries' verdicts: of the surrogate, and of their mean."""
    everything = tuple(v for k in others for v in k.verdicts())
    question = replace(kernel.request, judged=(*everything, *kernel.request.judged))
    every = [kernel, *others]
    offsets = {n.id: r["learned"][0] for k in every for n, r in zip(k.request.nodes, k.rows, strict=True)}
    posterior = LineageForecaster().posterior(question, offsets)
    beliefs = relative_forecasts(question, posterior, failure_probabilities(question), "taught").beliefs
    right = [r["log2_ratio"] for k in others for r in k.rows if _right(r)]
    failed = 1 - len(right) / sum(len(k.rows) for k in others)
    for node, row in zip(kernel.request.nodes, kernel.rows, strict=True):
        belief = beliefs[node.id]
        row["taught"] = [belief.mean, belief.sd, belief.p_fail]
        row["prior"] = [statistics.fmean(right), statistics.stdev(right), failed]


if __name__ == "__main__":
    sys.exit(main())
