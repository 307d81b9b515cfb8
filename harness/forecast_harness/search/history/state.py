"""What is known of a search: a fold of its log's events. Decides nothing.

Batch 0 is the seeds: each is judged, the first beside itself (which gives its best config and shows that
the lane works), the others beside the first. Proposals begin with batch 1. `batch_view` is all that a batch may
know; it does not depend on the order in which results came, or on results of the batches in between. Of full
verifications it holds those that were in the log when the batches that it rests on had ended.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_harness.records import (
    Node,
    NodeForecast,
    NodeResult,
    Proposed,
    SearchContext,
    SearchCost,
    SearchSettings,
    SearchTarget,
)
from forecast_harness.search.history.batches import (
    ArmStats,
    Batch,
    DuplicateProposal,
    HistoryPoint,
    arm_stats,
    measurement_cost,
    total_cost,
)
from forecast_harness.search.history.events import (
    Chosen,
    Confirmed,
    Event,
    Expired,
    Finished,
    Forecasted,
    Lost,
    Resumed,
    Started,
    Stopped,
    Verified,
)
from forecast_harness.search.history.verifications import apply_verified, fastest_unverified
from forecast_harness.search.planning.acquisition import expected_improvement
from forecast_harness.search.planning.bandit import PRIOR_GAIN
from forecast_harness.targets.novelty import NoveltyFilter

__all__ = ["SearchState", "apply_event", "replay_events"]

_COSTS = ("proposals", "forecasts", "measurements", "verification", "confirmation")


class SearchState:
    """Grows with `apply_event`, in place: events only ever add. Start with `SearchState()` or `replay_events`."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.resumed = 0
        self.nodes: dict[str, Node] = {}
        """Accepted nodes in the order in which they were."""
        self.duplicates: list[DuplicateProposal] = []
        self.judged: dict[str, NodeResult] = {}
        """With what full verification said."""
        self.scores: dict[str, float] = {}
        """log2(time / time of the first seed) of all that ran, and were not refused later."""
        self.verifications: list[Verified] = []
        """In the order of the log: batches may know the first of them."""
        self.lost_verifications: dict[str, list[Lost]] = {}
        """By node."""
        self.batches: dict[int, Batch] = {}
        self.answers: dict[str, Proposed] = {}
        """By request."""
        self.jobs: set[str] = set()
        """Ids of the jobs that are finished."""
        self.beliefs: dict[str, tuple[str, NodeForecast]] = {}
        """The latest by node: the reference that it is relative to, and the belief."""
        self.expected_gains: dict[str, float] = {}
        """Expected improvement by the same belief, `PRIOR_GAIN` where it abstains."""
        self.pool: dict[str, None] = {}
        """Nodes that were new once and are not measured: deferred, in order of acceptance."""
        self.history: list[HistoryPoint] = []
        self.confirmed: dict[str, NodeResult] = {}
        self.confirmations = 0
        self.lost_confirmations: list[Lost] = []
        """Confirmations whose lane failed."""
        self.expired: Expired | None = None
        self.stopped: Stopped | None = None
        self.spent = SearchCost()
        self.spent_on = {k: SearchCost() for k in _COSTS}
        self.novelty = NoveltyFilter()
        self.memo: dict[Any, Any] = {}
        """What `batch_view` and `decide` derived once; equal events give equal entries."""

    @property
    def context(self) -> SearchContext:
        """Raises `RecordError` before the first event."""
        return self._started_event.context

    @property
    def target(self) -> SearchTarget:
        """Raises `RecordError` before the first event."""
        return self._started_event.target

    @property
    def settings(self) -> SearchSettings:
        """Raises `RecordError` before the first event."""
        return self._started_event.context.settings

    @property
    def seeds(self) -> tuple[str, ...]:
        """Ids of the seeds; speed-ups are stated against the first."""
        return tuple(n.id for n in self._started_event.seeds)

    @property
    def _started_event(self) -> Started:
        if self.started is None:
            raise RecordError("a search's first event must be `started`; there is none yet")
        return self.started

    def batch(self, number: int) -> Batch:
        """The batch; a new one where nothing is known of it yet."""
        return self.batches.setdefault(number, Batch(number))

    @property
    def incumbent(self) -> str:
        """Id of the fastest that may lead by search measurements, ties by acceptance; the first seed before any."""
        return self._fastest(())

    def _fastest(self, without: Collection[str]) -> str:
        first = self.seeds[0]
        able = [n for n in self.scores if n not in without and (n == first or self.judged[n].may_lead)]
        return min(able, key=lambda n: self.scores[n], default=first)

    @property
    def next_to_verify(self) -> str:
        """Id of the node that is to be verified in full next, see `fastest_unverified`; '' without one."""
        best = self.scores.get(self.incumbent, math.inf)
        return fastest_unverified(self.scores, self.judged, self.lost_verifications, self.nodes, best)

    @property
    def best(self) -> str:
        """Id of what to ship: the fastest that is confirmed to beat the first seed, if any is.

        Else the fastest of those timed again, and before that of all. Nodes that failed their confirmation do
        not count, whatever they measured before.
        """
        refuted = {n for n, j in self.confirmed.items() if j.log2_ratio is None}
        again = {n: j.log2_ratio for n, j in self.confirmed.items() if j.log2_ratio is not None}
        if again:
            first = self.seeds[0]
            proven = [n for n in again if self.evidence(n) == "confirmed"]
            return min(proven or [first, *again], key=lambda n: 0.0 if n == first else again[n])
        return self._fastest(refuted)

    @property
    def best_score(self) -> float:
        """log2(time / time of the first seed) of `best`: confirmed, where it was."""
        found = self.confirmed.get(self.best)
        if found is not None and found.log2_ratio is not None and self.best != self.seeds[0]:
            return found.log2_ratio
        return self.scores.get(self.best, 0.0)

    @property
    def arms(self) -> dict[str, ArmStats]:
        """Of all batches so far, also those under way."""
        found: dict[str, ArmStats] = {}
        for number in sorted(self.batches):
            for arm, stats in arm_stats(self.batches[number], self.nodes, self.judged).items():
                found[arm] = found.get(arm, ArmStats()) + stats
        return found

    def reason(self, node: str) -> str:
        """Why a node was measured: `top`, `uncertain`, `audit`, `unforecast`, `seed`; empty if it was not."""
        if node in self.seeds:
            return "seed"
        found: str = self.memo.get(("reason", node), "")
        return found

    def evidence(self, node: str) -> str:
        """Of its confirmation (`NodeResult.evidence`); empty without one."""
        again = self.confirmed.get(node)
        return "" if again is None else again.evidence

    def status(self, node: str) -> str:
        """What became of a node, in a word or two for people."""
        if (judged := self.judged.get(node)) is not None:
            if judged.log2_ratio is None:
                return str(judged.outcome).replace("_", " ")
            return self.evidence(node) or (
                "not verified in full" if judged.is_unverified_gain else "measured"
            )
        if node in self.pool:
            return "deferred"
        if any(node in b.dropped for b in self.batches.values()):
            return "dropped"
        return "chosen" if node in self.nodes else "unknown"

    @property
    def text(self) -> str:
        """Where the search stands, in a line."""
        if self.started is None:
            return "not started"
        if self.stopped is not None:
            return ("interrupted: " if self.stopped.interrupted else "finished: ") + self.stopped.reason
        faster, ahead = 2**-self.best_score, self.next_to_verify
        waits = f" ({2 ** -self.scores[ahead]:.3f}x is not verified in full yet)" if ahead else ""
        return (
            f"batch {max(self.batches, default=0)}: {len(self.nodes)} nodes, "
            f"{self.spent.measurements} measured, {len(self.pool)} deferred, best {faster:.3f}x{waits}"
        )

    def close(self, number: int) -> None:
        """All requests of a batch are answered: what is new among the answers becomes nodes.

        Batches are closed in order, since what is new depends on what was accepted before. Does nothing for
        a batch that is closed.
        """
        batch = self.batch(number)
        if batch.closed:
            return
        batch.closed = True
        accepted: list[str] = []
        for _, answer in sorted(batch.answers.items()):
            for node in answer.nodes:
                like = self.novelty.add(node)
                if like is None:
                    self.nodes[node.id] = node
                    self.pool[node.id] = None
                    accepted.append(node.id)
                else:
                    self.duplicates.append(DuplicateProposal(node, *like))
        batch.nodes = tuple(accepted)


def replay_events(events: Iterable[Event]) -> SearchState:
    """The state after these events. Raises `RecordError` for what is no event, or out of place."""
    state = SearchState()
    for event in events:
        apply_event(state, event)
    return state


def apply_event(state: SearchState, event: Event) -> SearchState:
    """Add an event to `state` (in place) and return it. What is known already is ignored.

    Raises `RecordError` for what is no event, or comes before what it rests on.
    """
    kind = type(event)
    if kind not in _HANDLERS:
        raise RecordError(f"{event!r:.80} is no event: one of {', '.join(k.__name__ for k in _HANDLERS)}")
    if kind is not Started and state.started is None:
        raise RecordError(f"a search's first event must be `started`, not {kind.__name__.lower()}")
    _HANDLERS[kind](state, event)
    return state


def _started(state: SearchState, event: Started) -> None:
    if state.started is not None:
        return
    if not event.seeds:
        raise RecordError("a search needs at least one seed to start from, and to state speed-ups against")
    state.started = event
    for node in event.seeds:
        state.nodes[node.id] = node
        state.novelty.add(node)
    seeds = state.batch(0)
    seeds.closed, seeds.nodes = True, state.seeds
    judged = tuple(state.nodes)[: event.context.settings.budget.measurements]
    seeds.chosen = Chosen(0, judged, ("seed",) * len(judged), (1.0,) * len(judged))


def _resumed(state: SearchState, event: Resumed) -> None:
    state.resumed += 1
    if state.stopped is not None and state.stopped.interrupted:
        state.stopped = None


def _proposed(state: SearchState, event: Proposed) -> None:
    if event.request in state.answers:
        return
    batch = state.batch(event.batch)
    if batch.closed:
        raise RecordError(f"an answer to {event.request} came after batch {event.batch} was closed")
    state.answers[event.request] = batch.answers[event.request] = event
    _add_cost(state, "proposals", event.spent)


def _forecasted(state: SearchState, event: Forecasted) -> None:
    batch = state.batch(event.batch)
    if batch.forecasted is not None:
        return
    state.close(event.batch)
    batch.forecasted = event
    for node, belief in event.beliefs.items():
        state.beliefs[node] = (event.reference, belief)
        state.expected_gains[node] = PRIOR_GAIN if belief.abstains else expected_improvement(belief)
    _add_cost(state, "forecasts", event.spent)


def _chosen(state: SearchState, event: Chosen) -> None:
    batch = state.batch(event.batch)
    if batch.chosen is not None:
        return
    state.close(event.batch)
    if unknown := [n for n in event.nodes if n not in state.pool]:
        raise RecordError(
            f"batch {event.batch} chose {', '.join(unknown)[:200]}, not in the pool of unmeasured nodes"
        )
    batch.chosen = event
    _note_end(state, batch)
    # What only this batch asked, and nobody will ask for again.
    state.memo.pop(("question", event.batch), None)
    state.memo.pop(("requests", event.batch - state.settings.depth - 1), None)
    for node, reason in zip(event.nodes, event.reasons, strict=True):
        del state.pool[node]
        state.memo["reason", node] = reason


def _finished(state: SearchState, event: Finished) -> None:
    if event.job in state.jobs:
        return
    batch, judged = state.batch(event.batch), event.judged
    if batch.chosen is None or event.node not in batch.chosen.nodes:
        raise RecordError(f"{event.node} was judged in batch {event.batch}, which did not choose it")
    state.jobs.add(event.job)
    batch.finished[event.node] = state.judged[event.node] = judged
    score: float | None = None
    if judged.log2_ratio is not None:
        if event.node == state.seeds[0]:
            score = 0.0
        elif judged.against in state.scores:
            score = state.scores[judged.against] + judged.log2_ratio
        else:
            raise RecordError(f"{event.node} was timed beside {judged.against!r}, which has no score itself")
        state.scores[event.node] = batch.scores[event.node] = score
    _note_end(state, batch)
    _add_cost(state, "measurements", measurement_cost(judged))
    before = state.history[-1].best if state.history else 0.0
    state.history.append(
        HistoryPoint(
            state.spent.measurements,
            event.node,
            event.batch,
            state.reason(event.node),
            score,
            before if score is None or not judged.may_lead else min(before, score),
            state.spent_on["measurements"].device_seconds,
        )
    )


def _lost(state: SearchState, event: Lost) -> None:
    if not event.node:
        state.lost_confirmations.append(event)
        return
    batch = state.batch(event.batch)
    known = (state.lost_verifications if event.verification else batch.lost).setdefault(event.node, [])
    if event.job not in {e.job for e in known}:  # every try has an id of its own
        known.append(event)
        _note_end(state, batch)


def _note_end(state: SearchState, batch: Batch) -> None:
    """Called where a batch may end: what is verified by then is fixed by the log alone."""
    if batch.ended and batch.verifications < 0:
        batch.verifications = len(state.verifications)


def _verified(state: SearchState, event: Verified) -> None:
    if any(v.node == event.node for v in state.verifications):
        return
    apply_verified(event, state.judged, state.scores, state.history)
    state.verifications.append(event)
    spent = SearchCost(0, event.found.device_seconds, event.found.wall_seconds)
    _add_cost(state, "verification", spent)


def _confirmed(state: SearchState, event: Confirmed) -> None:
    fresh = {n: j for n, j in event.judged.items() if n not in state.confirmed}
    if event.judged and not fresh:
        return
    state.confirmed |= fresh
    state.confirmations += 1
    spent = total_cost(SearchCost(0, j.device_seconds, j.wall_seconds) for j in fresh.values())
    _add_cost(state, "confirmation", spent)


def _expired(state: SearchState, event: Expired) -> None:
    state.expired = state.expired or event


def _stopped(state: SearchState, event: Stopped) -> None:
    if state.stopped is None:
        state.stopped = event


_HANDLERS: Mapping[type, Any] = {
    Started: _started,
    Resumed: _resumed,
    Proposed: _proposed,
    Forecasted: _forecasted,
    Chosen: _chosen,
    Finished: _finished,
    Lost: _lost,
    Verified: _verified,
    Confirmed: _confirmed,
    Expired: _expired,
    Stopped: _stopped,
}


def _add_cost(state: SearchState, on: str, spent: SearchCost) -> None:
    state.spent_on[on] += spent
    state.spent += spent
