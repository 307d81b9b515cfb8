"""Candidates of packs, each judged once: the table that searches are replayed against.

A table is JSON Lines, gzipped. Its first line says where it was measured (`type` is `pool`); then come
targets (`target`: a `SearchTarget` as the search has it, and its seeds) and results (`node`: a `Node`, what it
gave beside the first seed, and the round of recording that it came in). Each line is a gzip member of its
own while a table grows, so that one which was cut short loses its last line and nothing else.
"""

from __future__ import annotations

import gzip
import json
import random
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from benchmarks.lib.result_files import say
from forecast_autotune.errors import RecordError, SettingsError
from forecast_autotune.records import Outcome, codec, digest
from forecast_harness.search.history.events import NodeJob, ProposalRequest
from forecast_harness.search.interfaces import LaneFailure, NodeJudge, Proposer
from forecast_harness.search.judging.devices import verification_plan
from forecast_harness.search.judging.factory import open_judge
from forecast_harness.search.judging.packs.judge import PackJudge
from forecast_harness.search.judging.races.rules import RaceRules
from forecast_harness.search.novelty import NoveltyFilter
from forecast_harness.search.proposers import open_proposer
from forecast_harness.search.records import Node, NodeResult, SearchTarget
from forecast_harness.search.targets import open_target

SCHEMA = 1
HOST_RULES = RaceRules(least=8, most=24, precise=0.02, seconds=1.5)
"""Timing on a shared CPU: launches cost nothing next to the processes they run in, and more of them help."""
PARTNERS = 2
"""Other nodes offered along with a parent, for crossovers."""
TRIES = 2
"""How often a node is judged whose lane fails."""


@dataclass
class PoolProblem:
    """One target's part of a table."""

    target: SearchTarget
    seeds: tuple[Node, ...]
    nodes: dict[str, Node] = field(default_factory=dict)
    """Judged ones, in the order in which they were recorded."""
    judged: dict[str, NodeResult] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)

    @property
    def scores(self) -> dict[str, float]:
        """log2(time / time of the first seed) of all that ran; the first seed's own is 0."""
        ran = {n: j.log2_ratio for n, j in self.judged.items() if j.log2_ratio is not None}
        return {n: 0.0 if n == self.seeds[0].id else s for n, s in ran.items()}


@dataclass
class PoolTable:
    """A table in memory."""

    about: Mapping[str, Any]
    problems: dict[str, PoolProblem] = field(default_factory=dict)


def whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line of a table; what was being written when a recording was cut short is left out."""
    left, text = path.read_bytes(), b""
    while left:
        member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # gzip's framing
        try:
            text += member.decompress(left)
        except zlib.error:
            break
        left = member.unused_data
    text = text[: text.rfind(b"\n") + 1]
    for line in text.splitlines():
        yield json.loads(line)


def read_pool(path: Path) -> PoolTable:
    """A table from its file. Raises `RecordError` for what is none."""
    found = list(whole_lines(path))
    if not found or found[0].get("type") != "pool" or found[0].get("schema") != SCHEMA:
        raise RecordError(f"{path} is no table of schema {SCHEMA}: its first line is {found[:1]!r:.120}")
    table = PoolTable(found[0])
    for line in found[1:]:
        if line["type"] == "target":
            target = codec.from_json(SearchTarget, line["target"])
            seeds = tuple(codec.from_json(Node, n) for n in line["seeds"])
            table.problems[target.name] = PoolProblem(target, seeds)
        elif line["type"] == "node":
            problem, node = table.problems[line["problem"]], codec.from_json(Node, line["node"])
            problem.nodes[node.id] = node
            problem.judged[node.id] = codec.from_json(NodeResult, line["judged"])
            problem.rounds[node.id] = line["round"]
    return table


class PoolWriter:
    """Appends to a table; a new one begins with `about`. Use from any thread.

    Raises `RecordError` where the file holds a table that was measured elsewhere.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path, self._mutex = path, threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        first = {"type": "pool", "schema": SCHEMA, **about}
        if not path.is_file():
            self._replace([first])
        self.table = read_pool(path)
        differs = {k: (self.table.about.get(k), v) for k, v in first.items() if self.table.about.get(k) != v}
        if differs:
            raise RecordError(f"{path} was measured otherwise: {differs}; give another file")
        # A torn line at the end would hide those appended after it.
        self._replace(whole_lines(path))

    def target(self, target: SearchTarget, seeds: Sequence[Node]) -> PoolProblem:
        """The problem of a target, begun if it is new. Raises `RecordError` if another has its name."""
        with self._mutex:
            known = self.table.problems.get(target.name)
            if known is None:
                shown = {"target": codec.to_json(target), "seeds": [codec.to_json(n) for n in seeds]}
                self._append({"type": "target", **shown})
                known = self.table.problems[target.name] = PoolProblem(target, tuple(seeds))
            elif known.target.id != target.id:
                raise RecordError(f"{self._path} holds another {target.name}: its pack has changed since")
            return known

    def node(self, problem: PoolProblem, node: Node, judged: NodeResult, number: int) -> None:
        """Add a result, on disk when this returns."""
        with self._mutex:
            row = {"node": codec.to_json(node), "judged": codec.to_json(judged)}
            self._append({"type": "node", "problem": problem.target.name, "round": number, **row})
            problem.nodes[node.id], problem.judged[node.id] = node, judged
            problem.rounds[node.id] = number

    def close(self) -> None:
        """Compress the whole as one: lines alone share nothing."""
        with self._mutex:
            self._replace(whole_lines(self._path))

    def _append(self, row: Mapping[str, Any]) -> None:
        with self._path.open("ab") as stream:
            stream.write(gzip.compress(_line(row), mtime=0))

    def _replace(self, rows: Iterable[Mapping[str, Any]]) -> None:
        part = self._path.with_name(f".{self._path.name}.part")
        part.write_bytes(gzip.compress(b"".join(map(_line, rows)), mtime=0))
        part.replace(self._path)


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n").encode()


# --- which candidates ---


@dataclass(frozen=True)
class RecordingPlan:
    """How many candidates of a problem are recorded, and in which rounds."""

    nodes: int
    """Per problem, seeds included."""
    first: int = 48
    """Children of the seeds."""
    parents: int = 2
    """Nodes expanded in every further round: the best that was not, and others of the faster half."""
    children: int = 12
    """Of each of these."""


def nodes_due(
    problem: PoolProblem, proposers: Mapping[str, Proposer], plan: RecordingPlan, number: int
) -> list[Node]:
    """The nodes of a round, recorded or not: a function of the rounds before it. Empty where all is done.

    Round 0 holds the seeds, round 1 their children, each further one children of what ran before.
    """
    if number == 0:
        return list(problem.seeds)
    before = {n: node for n, node in problem.nodes.items() if problem.rounds[n] < number}
    left = plan.nodes - len(before)
    scores = {n: s for n, s in problem.scores.items() if n in before}
    if left <= 0 or not scores:
        return []
    chance = random.Random(digest("round", problem.target.id, number))
    parents, each = _parents(problem, before, scores, plan, number, chance)
    fresh = NoveltyFilter()
    for node in before.values():
        fresh.add(node)
    found: list[Node] = []
    for parent in parents:
        others = [n for n in scores if n != parent]
        partners = chance.sample(others, min(PARTNERS, len(others)))
        made: list[Node] = []
        for name, proposer in proposers.items():
            for style in proposer.styles:
                share = -(-each // len(proposer.styles))
                request = _request(problem, before, (parent, *partners), f"{name}/{style}", share, number)
                made += [n for n in proposer.propose(request).nodes if fresh.add(n) is None]
        found += made
    return found[:left]


def _parents(
    problem: PoolProblem,
    before: Mapping[str, Node],
    scores: Mapping[str, float],
    plan: RecordingPlan,
    number: int,
    chance: random.Random,
) -> tuple[list[str], int]:
    """Whom to expand, and how many children each shall have."""
    if number == 1:
        seeds = [n.id for n in problem.seeds if n.id in scores]
        return seeds, -(-plan.first // max(1, len(seeds)))
    done = {n.parents[0] for n in before.values() if n.parents}
    ranked = sorted((n for n in scores if n not in done), key=lambda n: scores[n])
    faster = ranked[1 : max(plan.parents, len(ranked) // 2)]
    return ranked[:1] + chance.sample(faster, min(plan.parents - 1, len(faster))), plan.children


def _request(
    problem: PoolProblem, before: Mapping[str, Node], parents: Sequence[str], arm: str, n: int, number: int
) -> ProposalRequest:
    name = digest(problem.target.id, number, parents, arm)
    return ProposalRequest(
        id=f"{number:04d}-{name}",
        batch=number,
        arm=arm,
        target=problem.target,
        parents=tuple(before[p] for p in parents),
        judged={p: problem.judged[p] for p in parents},
        score=problem.scores[parents[0]],
        n=n,
        seed=int(name[:8], 16),
        known=tuple(before),
    )


# --- judging ---


@dataclass(frozen=True)
class RecordingSettings:
    """How to record."""

    device: str
    plan: RecordingPlan
    lanes: int
    seconds: float
    """No node is begun after so many."""
    folder: Path
    """For scratch files."""
    trials: int = 12
    also: Path | None = None
    """A folder with sources in subfolders named like the problems."""


def record_pool_nodes(
    names: Sequence[str],
    writer: PoolWriter,
    how: RecordingSettings,
    make_judge: Callable[[SearchTarget, int], NodeJudge] | None = None,
) -> dict[str, Any]:
    """Judge what is missing of every problem, round by round, a problem per lane; what it came to.

    Stops at the limit of time; a further call goes on where this one ended. `make_judge` opens what judges
    a target on a lane; by default that of the device.
    """
    opened = make_judge or partial(_judge, how)
    began, waiting = time.monotonic(), Queue[tuple[str, int]]()
    complete, errors = list[str](), list[str]()
    for name in names:
        waiting.put((name, 0))

    def work(lane: int) -> None:
        while time.monotonic() - began < how.seconds:
            try:
                name, number = waiting.get_nowait()
            except Empty:
                return
            try:
                over = _record_round(name, number, writer, how, lambda target: opened(target, lane), began)
            except (LaneFailure, SettingsError, RecordError) as error:
                errors.append(f"{name}: {error}")
                say(errors[-1])
                continue
            if over:
                complete.append(name)
            else:
                waiting.put((name, number + 1))

    threads = [threading.Thread(target=work, args=(n,), name=f"record-{n}") for n in range(how.lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    unfinished = [n for n in names if n not in complete]
    return {"seconds": round(time.monotonic() - began, 1), "unfinished": unfinished, "errors": errors}


def _record_round(
    name: str,
    number: int,
    writer: PoolWriter,
    how: RecordingSettings,
    opened: Callable[[SearchTarget], NodeJudge],
    began: float,
) -> bool:
    """One round of one problem; whether there was nothing left to do. Ends early where it is late."""
    target, seeds = open_target(name, device=how.device)
    problem = writer.target(target, seeds)
    proposers = {"mechanical": open_proposer("mechanical", target)}
    if number == 1 and how.also is not None and (how.also / name).is_dir():
        proposers["recorded"] = open_proposer(f"recorded:{how.also / name}", target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a rewrite that leaves itself out says so once per parent
        nodes = nodes_due(problem, proposers, how.plan, number)
    missing = [n for n in nodes if n.id not in problem.judged]
    if missing:
        with closing(_JudgeLane(problem, opened, how.trials)) as lane:
            for node in missing:
                if time.monotonic() - began > how.seconds:
                    return False
                writer.node(problem, node, lane.judged(node, number), number)
        ran = sum(n.id in problem.scores for n in nodes)
        best = min(problem.scores.values(), default=0.0)
        say(f"{name} round {number}: {len(problem.nodes)} nodes, {ran} of {len(nodes)} ran, best {best:+.3f}")
    return not nodes


def _judge(how: RecordingSettings, target: SearchTarget, lane: int) -> NodeJudge:
    folder = how.folder / f"lane-{lane}"
    if how.device == "cpu":
        rules, locks = HOST_RULES, how.folder / "locks"
        return PackJudge(target, verification_plan("cpu"), folder, number=lane, rules=rules, locks=locks)
    return open_judge(target, device=how.device, index=lane, folder=folder)


class _JudgeLane:
    """Judges nodes of a problem beside its first seed, with a fresh judge after each failure of a lane."""

    def __init__(
        self, problem: PoolProblem, opened: Callable[[SearchTarget], NodeJudge], trials: int
    ) -> None:
        self._problem, self._opened, self._trials = problem, opened, trials
        self._judge: NodeJudge | None = None
        self._lost = 0

    def judged(self, node: Node, number: int) -> NodeResult:
        """What the judge says; `infrastructure` for a node that its lane fails with, again and again.

        Raises `LaneFailure` where that happens to two nodes in a row: then the lane is to blame, and
        `RecordError` where there is no time of the seed to compare with.
        """
        target, seed = self._problem.target, self._problem.seeds[0]
        beside = self._problem.judged.get(seed.id)
        if node.id != seed.id and (beside is None or beside.outcome is not Outcome.OK):
            raise RecordError(f"the seed of {target.name} could not be judged: {beside!r:.200}")
        config = beside.config if beside is not None else {}
        reason = ""
        for attempt in range(TRIES):
            name = digest("pool", target.id, node.id, attempt)
            self._judge = self._judge or self._opened(target)
            try:
                found = self._judge.judge(NodeJob(name, node, seed, config, target, number, self._trials))
            except LaneFailure as error:
                reason = f"{node.id}: {error}"[:500]
                self.close()
            else:
                self._lost = 0
                return found
        self._lost += 1
        if self._lost > 1:
            raise LaneFailure(reason)
        return NodeResult(Outcome.INFRASTRUCTURE, seed.id, feedback=reason)

    def close(self) -> None:
        """End the judge's processes."""
        if self._judge is not None:
            self._judge.close()
            self._judge = None
