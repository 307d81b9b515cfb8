"""A search without a device: a landscape of small programs, with a proposer, a judge and a forecaster.

A node is `def run(x): return x * A + B`; its time follows from A and B by a formula with ridges, some nodes
fail, and measurements carry noise that is fixed by the job. Everything is a function of the request, so that two
searches with the same requests get the same. A request that would cost money writes two lines to a ledger, with
O_APPEND: one as it begins, and one as the last thing before it answers.
"""

from __future__ import annotations

import math
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from forecast_autotune.records import Outcome, digest
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.records import (
    ConfirmationJob,
    Node,
    NodeForecast,
    NodeJob,
    NodeResult,
    ProposalRequest,
    Proposed,
    SearchContext,
    SearchCost,
    SearchSettings,
    SearchTarget,
    TargetKind,
)
from forecast_harness.search.events import Forecasted, NodeForecastRequest
from forecast_harness.search.plan import action_key
from forecast_harness.targets.novelty import node_identity
from forecast_harness.trials.protocol import NodeJudge

TARGET = SearchTarget(TargetKind.PACK, "table", "table-1", "torch", "run", "x * A + B")
SIZE = 40
NOISE = 0.003


def program_text(a: int, b: int) -> str:
    """The program of a point; wraps around at the edges."""
    return f"def run(x):\n    return x * {a % SIZE} + {b % SIZE}\n"


def parse_point(text: str) -> tuple[int, int]:
    """Return where a program lies."""
    a, b = re.findall(r"\d+", text)
    return int(a), int(b)


def log2_seconds(a: int, b: int) -> float:
    """log2 of its time, from about -2 to 1."""
    return 0.6 * math.cos(a / 3.0) + 0.4 * math.cos(b / 2.0) - 0.02 * a - 0.01 * b


def does_fail(a: int, b: int) -> bool:
    """One in eleven or so."""
    return (7 * a + 13 * b) % 11 == 3


def make_node(a: int, b: int, **more: object) -> Node:
    """A node of the landscape."""
    text = program_text(a, b)
    id_ = node_identity(TARGET.id, "torch", text)
    return Node(id_, text, "torch", (), Provenance(Origin.HAND), **more)  # type: ignore[arg-type]


SEEDS = (make_node(0, 0), make_node(1, 5))
CONTEXT = SearchContext(TARGET.id, (), "table", {"table": "1"}, "none", "harness-1")


class CallLedger:
    """A ledger of paid answers, in a file that outlives any kill."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, what: str) -> None:
        if self._path is not None:
            stream = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.write(stream, what.encode() + b"\n")
            os.close(stream)


class LandscapeAuthor:
    """Steps from a parent: `near` by one or two, `far` anywhere. Has nothing more after `most` children."""

    name = "table"
    styles: Sequence[str] = ("near", "far")

    def __init__(self, ledger: CallLedger | None = None, delay_s: float = 0.0) -> None:
        self._ledger, self._delay = ledger or CallLedger(None), delay_s

    def propose(self, request: ProposalRequest) -> Proposed:
        chance = random.Random(request.seed)
        self._ledger.write(f"begin {request.id}")
        time.sleep(self._delay * chance.random())
        a, b = parse_point(request.parents[0].source)
        reach = 2 if request.arm.endswith("near") else SIZE
        nodes = []
        for _ in range(request.n):
            text = program_text(a + chance.randint(-reach, reach), b + chance.randint(-reach, reach))
            nodes.append(Node("", text, "torch", (), Provenance(Origin.REWRITE)))
        self._ledger.write(f"done {request.id}")
        return Proposed(request.id, tuple(nodes), SearchCost(wall_seconds=0.1, tokens=50 * len(nodes)))

    def close(self) -> None:
        pass


class LandscapeJudge(NodeJudge):
    """Looks times up."""

    def __init__(self, ledger: CallLedger | None = None, delay_s: float = 0.0) -> None:
        self._ledger, self._delay = ledger or CallLedger(None), delay_s

    def judge(self, job: NodeJob) -> NodeResult:
        chance = random.Random(digest(job.node.id, job.against.id))
        self._ledger.write(f"begin {job.id}")
        time.sleep(self._delay * chance.random())
        here, there = parse_point(job.node.source), parse_point(job.against.source)
        spent = 0.5 + chance.random()
        if does_fail(*here) and job.node.id != SEEDS[0].id:
            result = NodeResult(Outcome.INCORRECT, job.against.id, device_seconds=spent, stage="verify")
        else:
            ratio = log2_seconds(*here) - log2_seconds(*there) + chance.gauss(0.0, NOISE)
            result = NodeResult(Outcome.OK, job.against.id, ratio, NOISE, stage="time")
            result = replace(result, device_seconds=spent, wall_seconds=2 * spent)
        self._ledger.write(f"done {job.id}")
        return result

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        there = log2_seconds(*parse_point(confirm.seed_node.source))
        self._ledger.write(f"begin {action_key(confirm)}")
        result = {
            n.id: NodeResult(
                Outcome.OK,
                confirm.seed_node.id,
                log2_seconds(*parse_point(n.source)) - there,
                NOISE,
                device_seconds=3.0,
            )
            for n in confirm.nodes
        }
        self._ledger.write(f"done {action_key(confirm)}")
        return result

    def close(self) -> None:
        pass


class LandscapeForecaster:
    """Knows the landscape up to an error that is fixed by the node; abstains for one in twenty."""

    name = "table-1"

    def __init__(self, ledger: CallLedger | None = None, error: float = 0.3) -> None:
        self._ledger, self._error = ledger or CallLedger(None), error

    def forecast(self, question: NodeForecastRequest) -> Forecasted:
        there = log2_seconds(*parse_point(question.reference.source))
        self._ledger.write(f"begin {action_key(question)}")
        beliefs = {n.id: self._belief(n, there) for n in question.nodes}
        self._ledger.write(f"done {action_key(question)}")
        return Forecasted(question.batch, question.reference.id, beliefs, SearchCost(wall_seconds=0.01))

    def _belief(self, node: Node, there: float) -> NodeForecast:
        chance = random.Random(node.id)
        mean = log2_seconds(*parse_point(node.source)) - there + chance.gauss(0.0, self._error)
        p_fail = 0.6 if does_fail(*parse_point(node.source)) else 0.05
        better = 0.5 * math.erfc(mean / self._error / math.sqrt(2.0))
        return NodeForecast(mean, self._error, p_fail, (1.0 - p_fail) * better, chance.random() < 0.05)

    def close(self) -> None:
        pass


def settings(measurements: int = 60, **more: object) -> SearchSettings:
    """Small batches, so that a search has many."""
    from forecast_harness.records import SearchBudget

    given = {"k": 2, "samples": 8, "patience": 30, "proposers": ("table",), "surrogate": "table", **more}
    return SearchSettings(budget=SearchBudget(measurements), **given)  # type: ignore[arg-type]
