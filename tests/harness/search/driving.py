"""Searches without threads: every answer comes when a generator says so."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.search_table import CONTEXT, SEEDS, TARGET, TableForecaster, TableJudge, TableProposer
from forecast_harness.search.decide import pending
from forecast_harness.search.events import (
    Action,
    Choose,
    Confirm,
    Event,
    Job,
    Question,
    Request,
    Started,
    Stop,
    Stopped,
)
from forecast_harness.search.interfaces import Forecaster, Judge, LaneLost, Proposer
from forecast_harness.search.log import decoded, encode
from forecast_harness.search.records import Judged, Node, Settings
from forecast_harness.search.state import State, apply, fold
from forecast_harness.search.work import asked, booked, lost, received


class Spy(TableJudge):
    """Counts, and may do otherwise for some jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.judged: Counter[str] = Counter()
        self.confirmed: list[list[str]] = []

    def judge(self, job: Job) -> Judged:
        self.judged[job.node.id] += 1
        return super().judge(job)

    def confirm(self, confirm: Confirm) -> Mapping[str, Judged]:
        self.confirmed.append([n.id for n in confirm.nodes])
        return super().confirm(confirm)


class World:
    """The plug-ins, and how often a lane fails."""

    def __init__(
        self,
        settings: Settings,
        *,
        proposer: Proposer | None = None,
        judge: Judge | None = None,
        forecaster: Forecaster | None = None,
        forecasts: bool = True,
        seeds: tuple[Node, ...] = SEEDS,
    ) -> None:
        self.proposers = {"table": proposer or TableProposer()}
        self.judge = judge or TableJudge()
        self.forecaster = forecaster or (TableForecaster() if forecasts else None)
        arms = tuple(f"table/{s}" for s in self.proposers["table"].styles)
        context = replace(
            CONTEXT,
            seeds=tuple(n.id for n in seeds),
            settings=settings,
            surrogate=self.forecaster.name if self.forecaster else "none",
            arms=arms,
        )
        self.started = Started(context, TARGET, seeds, "")

    def answer(self, action: Action) -> Event:
        """What comes of an action."""
        if isinstance(action, Choose):
            return action.event
        if isinstance(action, Stop):
            return Stopped(action.reason)
        if isinstance(action, Request | Question):
            return booked(action, asked(action, self.proposers, self.forecaster))
        try:
            if isinstance(action, Confirm):
                return booked(action, received(action, self.judge.confirm(action)))
            return booked(action, received(action, self.judge.judge(action)))
        except LaneLost as error:
            return lost(action, error)

    def drive(
        self, order: random.Random, events: Sequence[Event] = (), most: int = 100_000
    ) -> tuple[list[Event], State]:
        """Go on from `events` until nothing is due, or there are `most`; answers come in random order."""
        log = list(events) or [self.started]
        state = fold(log)
        while len(log) < most and (due := pending(state)):
            log.append(decoded(encode(self.answer(order.choice(due)))))
            apply(state, log[-1])
        return log, state


def outcome(state: State) -> dict[str, Any]:
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
        "refused": sorted(r.node.id for r in state.refused),
        "batches": batches,
        "scores": dict(sorted(state.scores.items())),
        "requests": sorted(state.answers),
        "confirmed": sorted(state.confirmed),
        "pool": list(state.pool),
        "best": [state.best, state.best_score],
        "stopped": state.stopped and state.stopped.reason,
    }


def same(events: Iterable[Event]) -> str:
    """Events as one text, to compare logs by."""
    return json.dumps([encode(e).decode() for e in events])


def jobs(actions: Iterable[Action]) -> list[Job]:
    """The jobs among actions."""
    return [a for a in actions if isinstance(a, Job)]
