"""Searches of a table: answers come when a generator says so, or of threads and lanes."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.search.synthetic_landscape import (
    CONTEXT,
    SEEDS,
    TARGET,
    CallLedger,
    LandscapeAuthor,
    LandscapeForecaster,
    LandscapeJudge,
    parse_point,
)
from forecast_autotune.records import Outcome
from forecast_harness.authors.author import Author
from forecast_harness.records import (
    ConfirmationJob,
    FullVerification,
    Node,
    NodeJob,
    NodeResult,
    ProposalRequest,
    SearchSettings,
    VerificationJob,
)
from forecast_harness.search.events import (
    Action,
    Event,
    NodeForecastRequest,
    RecordChoice,
    Started,
    Stopped,
    StopSearch,
)
from forecast_harness.search.forecasters import Forecaster
from forecast_harness.search.log import decode, encode
from forecast_harness.search.plan import pending_actions
from forecast_harness.search.run import ask_plugin, judge_event, lane_failure_event, plugin_event, search
from forecast_harness.search.state import SearchState, apply_event, replay_events
from forecast_harness.trials.judge_pool import LocalJudgePool
from forecast_harness.trials.protocol import LaneFailure, NodeJudge


class CountingJudge(LandscapeJudge):
    """Counts, and may do otherwise for some jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.judged: Counter[str] = Counter()
        self.confirmed: list[list[str]] = []

    def judge(self, job: NodeJob) -> NodeResult:
        self.judged[job.node.id] += 1
        return super().judge(job)

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        self.confirmed.append([n.id for n in confirm.nodes])
        return super().confirm(confirm)


class LateJudge(CountingJudge):
    """Leaves full verification to `verify`, which refuses some nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.verified: list[str] = []

    def judge(self, job: NodeJob) -> NodeResult:
        found = super().judge(job)
        return replace(found, facts={**found.facts, "verified_in_full": False})

    def verify(self, job: VerificationJob) -> FullVerification:
        self.verified.append(job.node.id)
        if is_cheat(job.node):
            return FullVerification(Outcome.INCORRECT, "wrong at a hidden size", wall_seconds=2.0)
        return FullVerification(Outcome.OK, facts={"launches": 9}, wall_seconds=2.0)


def is_cheat(node: Node) -> bool:
    """Whether `LateJudge` refuses it when it verifies: one in three."""
    a, b = parse_point(node.source)
    return (5 * a + 3 * b) % 3 == 1 and node.id not in {n.id for n in SEEDS}


class SimulatedSearch:
    """The plug-ins, and how often a lane fails."""

    def __init__(
        self,
        settings: SearchSettings,
        *,
        proposer: Author | None = None,
        judge: NodeJudge | None = None,
        forecaster: Forecaster | None = None,
        forecasts: bool = True,
    ) -> None:
        self.proposers = {"table": proposer or LandscapeAuthor()}
        self.judge = judge or LandscapeJudge()
        self.forecaster = forecaster or (LandscapeForecaster() if forecasts else None)
        arms = tuple(f"table/{s}" for s in self.proposers["table"].styles)
        context = replace(
            CONTEXT,
            seeds=tuple(n.id for n in SEEDS),
            settings=settings,
            surrogate=self.forecaster.name if self.forecaster else "none",
            arms=arms,
        )
        self.started = Started(context, TARGET, SEEDS, "")

    def answer(self, action: Action) -> Event:
        """What comes of an action."""
        if isinstance(action, RecordChoice):
            return action.event
        if isinstance(action, StopSearch):
            return Stopped(action.reason)
        if isinstance(action, ProposalRequest | NodeForecastRequest):
            return plugin_event(action, ask_plugin(action, self.proposers, self.forecaster))
        try:
            if isinstance(action, ConfirmationJob):
                return judge_event(action, self.judge.confirm(action))
            if isinstance(action, VerificationJob):
                return judge_event(action, self.judge.verify(action))
            return judge_event(action, self.judge.judge(action))
        except LaneFailure as error:
            return lane_failure_event(action, error)

    def run(
        self, order: random.Random, events: Sequence[Event] = (), most: int = 100_000
    ) -> tuple[list[Event], SearchState]:
        """Go on from `events` until nothing is due, or there are `most`; answers come in random order."""
        log = list(events) or [self.started]
        state = replay_events(log)
        while len(log) < most and (due := pending_actions(state)):
            log.append(decode(encode(self.answer(order.choice(due)))))
            apply_event(state, log[-1])
        return log, state


def comparable_outcome(state: SearchState) -> dict[str, Any]:
    """All of a state that does not depend on when answers came."""
    batches = {
        b.number: [
            b.nodes,
            b.chosen and [b.chosen.nodes, b.chosen.reasons, b.chosen.propensities],
            sorted(b.finished),
            sorted(b.dropped),
        ]
        for b in state.batches.values()
    }
    return {
        "nodes": list(state.nodes),
        "refused": sorted(r.id for r in state.duplicates),
        "batches": batches,
        "scores": dict(sorted(state.scores.items())),
        "requests": sorted(state.answers),
        "confirmed": sorted(state.confirmed),
        "pool": list(state.pool),
        "best": [state.best, state.best_score],
        "stopped": state.stopped and state.stopped.reason,
    }


def jobs(actions: Iterable[Action]) -> list[NodeJob]:
    """The jobs among actions."""
    return [a for a in actions if isinstance(a, NodeJob)]


def run_search(
    folder: Path,
    chosen: SearchSettings,
    *,
    make_judge: Callable[[int], NodeJudge] | None = None,
    pool: type[LocalJudgePool] = LocalJudgePool,
    proposer: LandscapeAuthor | None = None,
    forecaster: LandscapeForecaster | None = None,
    ledger: CallLedger | None = None,
    watch: Callable[[SearchState], None] | None = None,
    lanes: int = 2,
    forecasts: bool = True,
    began: float | None = None,
    **context: Any,
) -> SearchState:
    with contextlib.closing(pool(make_judge or (lambda _: LandscapeJudge(ledger, 0.002)), lanes)) as made:
        return search(
            TARGET,
            SEEDS,
            settings=chosen,
            context=replace(CONTEXT, **context),
            proposers={"table": proposer or LandscapeAuthor(ledger, 0.002)},
            forecaster=(forecaster or LandscapeForecaster(ledger)) if forecasts else None,
            lanes=made,
            folder=folder,
            watch=watch,
            began=began,
        )
