"""Searches against a table of recorded results: the real search, whose proposals and results are dealt.

A child is offered when its recorded first parent is expanded, under the arm that made it; what a node is
worth beside another is the difference of their recorded scores. Nothing else of the table reaches a search:
its forecaster sees the results of its own run, except for the oracle, which is there to bound the others.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.lib.search.candidate_pool import PoolProblem
from forecast_autotune.records import Outcome, digest
from forecast_harness.search.history.events import (
    ConfirmationJob,
    Forecasted,
    NodeForecastRequest,
    NodeJob,
    ProposalRequest,
    Proposed,
)
from forecast_harness.search.history.state import SearchState
from forecast_harness.search.interfaces import Forecaster, LaneFailure, NodeJudge
from forecast_harness.search.lanes.local_lanes import LocalJudgePool
from forecast_harness.search.proposers.drafts import draw_seed
from forecast_harness.search.records import (
    Node,
    NodeForecast,
    NodeResult,
    SearchBudget,
    SearchContext,
    SearchSettings,
)
from forecast_harness.search.run import search

ARMS = ("unfiltered", "filtered", "random", "oracle")
ORACLE_SPREAD = 0.02
"""Spread (log2) that the oracle states: about that of a measurement."""
PATIENCE = 1000
"""No search ends before its budget for want of a better node: budgets are to be equal."""

DEFAULT_SETTINGS = SearchSettings()


class PoolProposer:
    """A recorded proposer: children of the asked parent, those of the asked style first."""

    def __init__(self, name: str, problem: PoolProblem) -> None:
        self.name = name
        self._children: dict[str, list[Node]] = defaultdict(list)
        styles = set()
        for node in problem.nodes.values():
            # A result that blames the harness is no result: a search would try again, and wait for nothing.
            lost = problem.judged[node.id].outcome is Outcome.INFRASTRUCTURE
            if node.parents and node.arm.startswith(f"{name}/") and not lost:
                self._children[node.parents[0]].append(node)
                styles.add(node.arm.rpartition("/")[2])
        self.styles: Sequence[str] = tuple(sorted(styles))

    def propose(self, request: ProposalRequest) -> Proposed:
        """See `Proposer`."""
        known = set(request.known)
        left = [n for n in self._children[request.parents[0].id] if n.id not in known]
        random.Random(draw_seed(request)).shuffle(left)
        left.sort(key=lambda n: n.arm != request.arm)
        problem = "" if left else "every recorded child is known already"
        return Proposed(
            request.id, tuple(left[: request.n]), problem=problem, exhausted=len(left) <= request.n
        )

    def close(self) -> None:
        """Nothing is held."""


class PoolJudge(NodeJudge):
    """Answers with what was recorded, at once."""

    def __init__(self, problem: PoolProblem) -> None:
        self._problem, self._scores = problem, problem.scores

    def judge(self, job: NodeJob) -> NodeResult:
        """See `NodeJudge`."""
        return self._beside(job.node.id, job.against.id)

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        """The same numbers again: what is confirmed was measured when the table was."""
        first = confirm.seed_node.id
        return {n.id: self._beside(n.id, first) for n in (*confirm.nodes, confirm.seed_node)}

    def close(self) -> None:
        """Nothing is held."""

    def _beside(self, node: str, against: str) -> NodeResult:
        found = self._problem.judged.get(node)
        if found is None:
            raise LaneFailure(f"{node} is not in the table")
        if found.log2_ratio is None:
            return replace(found, against=against)
        sd = 0.0 if node == against else math.hypot(found.sd, self._problem.judged[against].sd)
        ratio = self._scores[node] - self._scores[against]
        return replace(found, against=against, log2_ratio=ratio, sd=sd)


class RandomForecaster:
    """Likes candidates by a draw: a random choice of the same pool, with the same bookkeeping."""

    name = "drawn-1"

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def forecast(self, question: NodeForecastRequest) -> Forecasted:
        """See `Forecaster`."""
        beliefs = {
            n.id: NodeForecast(-random.Random(digest(self._seed, n.id)).random(), 0.1, 0.0, 1.0)
            for n in question.nodes
        }
        return Forecasted(question.batch, question.reference.id, beliefs)

    def close(self) -> None:
        """Nothing is held."""


class OracleForecaster:
    """Knows the table: a candidate is worth the best score among it and its recorded descendants."""

    name = "oracle-1"

    def __init__(self, problem: PoolProblem) -> None:
        self._scores, self._worth = problem.scores, dict(problem.scores)
        for node in reversed(problem.nodes.values()):  # children were recorded after their parents
            above = node.parents[0] if node.parents else ""
            if node.id in self._worth and above in self._worth:
                self._worth[above] = min(self._worth[above], self._worth[node.id])

    def forecast(self, question: NodeForecastRequest) -> Forecasted:
        """See `Forecaster`."""
        base = self._scores.get(question.reference.id, 0.0)
        beliefs = {}
        for node in question.nodes:
            worth = self._worth.get(node.id)
            mean = 0.0 if worth is None else worth - base
            beliefs[node.id] = NodeForecast(mean, ORACLE_SPREAD, float(worth is None), float(mean < 0.0))
        return Forecasted(question.batch, question.reference.id, beliefs)

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class ForecastRecord:
    """The last forecast of a node before it was measured, and what came of it."""

    belief: NodeForecast
    came: float | None
    """log2(time / time of the same reference); None where it failed."""
    noise: float
    """Standard error of `came`."""


@dataclass(frozen=True)
class ReplayedSearch:
    """What one replayed search did."""

    problem: str
    seed: int
    arm: str
    best: tuple[float, ...]
    """Lowest score after 1, 2, ... measurements, the seeds' included; log2 against the first seed."""
    told: tuple[ForecastRecord, ...]
    ended: str

    def at(self, budget: int) -> float:
        """The best after so many measurements; a search that ended before has found no more."""
        return self.best[min(budget, len(self.best)) - 1]

    def reached(self, score: float) -> int | None:
        """Measurements until the best was at least as good as `score`; None if it never was."""
        return next((n for n, best in enumerate(self.best, 1) if best <= score + 1e-9), None)


def replay_search(
    problem: PoolProblem,
    arm: str,
    *,
    budget: int,
    seed: int,
    forecaster: Forecaster | None = None,
    settings: SearchSettings = DEFAULT_SETTINGS,
) -> ReplayedSearch:
    """Search a table. `forecaster` is that of the arm `filtered`; the others bring their own.

    Raises `ValueError` for an arm that is none of `ARMS`.
    """
    asked: Mapping[str, Forecaster | None] = {
        "unfiltered": None,
        "filtered": forecaster,
        "random": RandomForecaster(seed),
        "oracle": OracleForecaster(problem),
    }
    if arm not in asked:
        raise ValueError(f"an arm is one of {', '.join(ARMS)}, not {arm!r}")
    chosen = replace(settings, budget=SearchBudget(budget), surrogate=arm, seed=seed)
    state = run_recorded_search(problem, PoolJudge(problem), asked[arm], chosen)
    return ReplayedSearch(
        problem.target.name,
        seed,
        arm,
        tuple(p.best for p in state.history),
        tuple(told(state)),
        state.stopped.reason if state.stopped is not None else "",
    )


def run_recorded_search(
    problem: PoolProblem, judge: NodeJudge, forecaster: Forecaster | None, settings: SearchSettings
) -> SearchState:
    """The search of a recorded problem to the end of its budget, whatever it finds; nothing of it is kept."""
    names = sorted({n.arm.partition("/")[0] for n in problem.nodes.values() if n.parents})
    lanes = LocalJudgePool(lambda _: judge, 1)
    with tempfile.TemporaryDirectory(prefix="search-replay-") as folder, closing(lanes):
        return search(
            problem.target,
            problem.seeds,
            settings=replace(settings, patience=PATIENCE),
            context=SearchContext(problem.target.id, (), "table", {"table": "1"}, "", "table"),
            proposers={name: PoolProposer(name, problem) for name in names},
            forecaster=forecaster,
            lanes=lanes,
            folder=Path(folder),
        )


def told(state: SearchState) -> Iterator[ForecastRecord]:
    """What was forecast of every node that was measured, and what came."""
    for node, (reference, belief) in state.beliefs.items():
        if node in state.judged:
            score, judged = state.scores.get(node), state.judged[node]
            came = None if score is None else score - state.scores[reference]
            yield ForecastRecord(belief, came, math.hypot(judged.sd, state.judged[reference].sd))
