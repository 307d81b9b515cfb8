"""The state of a search: a fold of its log's events, and the part of it that a batch may know. Decides nothing.

Batch 0 is the seeds: each is judged, the first beside itself (which gives its best config and shows that
the lane works), the others beside the first. Proposals begin with batch 1. A `BatchView` is all that a batch may
know; it does not depend on the order in which results came, or on results of the batches in between. It holds the
full verifications that were in the log when the batches that it rests on had ended.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_harness.records import (
    MIN_PROGRESS,
    Node,
    NodeForecast,
    NodeResult,
    Proposed,
    SearchContext,
    SearchCost,
    SearchSettings,
    SearchTarget,
)
from forecast_harness.search.acquisition import PRIOR_GAIN, expected_improvement
from forecast_harness.search.events import (
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

MAX_RETRIES = 2
"""Retries of a job whose lane failed; after that its node is dropped, unjudged."""


@dataclass
class Batch:
    """One batch and its answers."""

    number: int
    answers: dict[str, Proposed] = field(default_factory=dict)
    """By request."""
    closed: bool = False
    """All requests are answered; `nodes` is final."""
    nodes: tuple[str, ...] = ()
    """The new ones among its proposals, in the order of request ids and positions."""
    forecasted: Forecasted | None = None
    chosen: Chosen | None = None
    finished: dict[str, NodeResult] = field(default_factory=dict)
    """By node, as they were judged: without what full verification said later."""
    lost: dict[str, list[Lost]] = field(default_factory=dict)
    """By node."""
    scores: dict[str, float] = field(default_factory=dict)
    """log2(time / time of the first seed) by node, of all that ran, as they were timed."""
    verifications: int = -1
    """The number of `Verified` in the log when this batch ended: batches that rest on it know these. -1 before
    its end."""

    @property
    def dropped(self) -> frozenset[str]:
        """Nodes whose lanes failed too often."""
        return frozenset(
            n for n, losses in self.lost.items() if len(losses) > MAX_RETRIES and n not in self.finished
        )

    @property
    def open(self) -> tuple[str, ...]:
        """Nodes still to be judged."""
        dropped = self.dropped
        nodes = self.chosen.nodes if self.chosen is not None else ()
        return tuple(n for n in nodes if n not in self.finished and n not in dropped)

    @property
    def ended(self) -> bool:
        """Everything chosen is judged or dropped."""
        return self.chosen is not None and not self.open

    @property
    def proposing_cost(self) -> SearchCost:
        """The cost of its proposals."""
        return total_cost(a.spent for _, a in sorted(self.answers.items()))

    @property
    def forecasting_cost(self) -> SearchCost:
        """The cost of its forecasts."""
        return self.forecasted.spent if self.forecasted is not None else SearchCost()

    @property
    def measuring_cost(self) -> SearchCost:
        """The cost of judging its nodes."""
        return total_cost(measurement_cost(result) for _, result in sorted(self.finished.items()))

    @property
    def spent(self) -> SearchCost:
        """The cost so far."""
        return self.proposing_cost + self.forecasting_cost + self.measuring_cost


@dataclass(frozen=True)
class HistoryPoint:
    """One measurement of the history."""

    measurements: int
    """Measurements so far, this one included."""
    node: str
    batch: int
    reason: str
    """Why it was measured; `seed` for batch 0."""
    score: float | None
    best: float
    """Lowest score so far."""
    device_seconds: float
    """Spent on measuring so far."""


def total_cost(parts: Iterable[SearchCost]) -> SearchCost:
    """The sum, in the order given: sums of floats depend on it, and decisions on them."""
    return sum(parts, SearchCost())


def measurement_cost(result: NodeResult) -> SearchCost:
    """The cost of judging a node: one measurement, however many configs it tried or how far it got."""
    return SearchCost(1, result.device_seconds, result.wall_seconds)


_COSTS = ("proposals", "forecasts", "measurements", "verification", "confirmation")


class SearchState:
    """Grows with `apply_event`, in place: events only ever add. Start with `SearchState()` or `replay_events`."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.resumed = 0
        self.nodes: dict[str, Node] = {}
        """Accepted nodes in the order in which they were."""
        self.duplicates: list[Node] = []
        """Proposals that were not new."""
        self.judged: dict[str, NodeResult] = {}
        """Results by node, full verification included."""
        self.scores: dict[str, float] = {}
        """log2(time / time of the first seed) of all that ran, and were not refused later."""
        self.verifications: list[Verified] = []
        """Full verifications in the order of the log: batches may know the first of them."""
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
        self.memo: dict[Any, Any] = {}
        """Values that `batch_view` and `plan` derived once; equal events give equal entries."""

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
        ids = [n for n in self.scores if n not in without and (n == first or self.judged[n].may_lead)]
        return min(ids, key=lambda n: self.scores[n], default=first)

    @property
    def next_to_verify(self) -> str:
        """Id of the fastest node that would lead once it is verified in full; '' without one.

        One hardly ahead of the fastest that may lead counts as equal to it. The first accepted of equal ones is taken.
        """
        best = self.scores.get(self.incumbent, math.inf)
        waiting = [
            n
            for n, score in self.scores.items()
            if score < best - MIN_PROGRESS
            and not self.judged[n].may_lead
            and len(self.lost_verifications.get(n, ())) <= MAX_RETRIES
        ]
        return min(waiting, key=lambda n: (self.scores[n], list(self.nodes).index(n)), default="")

    @property
    def best(self) -> str:
        """Id of what to ship: the fastest that is confirmed to beat the first seed, if any is.

        Else the fastest of those timed again, and before that of all. Nodes that failed their confirmation do
        not count, whatever they measured before.
        """
        refuted = {n for n, j in self.confirmed.items() if j.log2_ratio is None}
        ratios = {n: j.log2_ratio for n, j in self.confirmed.items() if j.log2_ratio is not None}
        if ratios:
            first = self.seeds[0]
            proven = [n for n in ratios if self.evidence(n) == "confirmed"]
            return min(proven or [first, *ratios], key=lambda n: 0.0 if n == first else ratios[n])
        return self._fastest(refuted)

    @property
    def best_score(self) -> float:
        """log2(time / time of the first seed) of `best`: confirmed, where it was."""
        confirmation = self.confirmed.get(self.best)
        if confirmation is not None and confirmation.log2_ratio is not None and self.best != self.seeds[0]:
            return confirmation.log2_ratio
        return self.scores.get(self.best, 0.0)

    def reason(self, node: str) -> str:
        """Why a node was measured: `top`, `uncertain`, `audit`, `unforecast`, `seed`; empty if it was not."""
        if node in self.seeds:
            return "seed"
        text: str = self.memo.get(("reason", node), "")
        return text

    def evidence(self, node: str) -> str:
        """The evidence of its confirmation (`NodeResult.evidence`); empty without one."""
        confirmation = self.confirmed.get(node)
        return "" if confirmation is None else confirmation.evidence

    def status(self, node: str) -> str:
        """The fate of a node, in a word or two for people."""
        if (result := self.judged.get(node)) is not None:
            if result.log2_ratio is None:
                return str(result.outcome).replace("_", " ")
            return self.evidence(node) or (
                "not verified in full" if result.is_unverified_gain else "measured"
            )
        if node in self.pool:
            return "deferred"
        if any(node in b.dropped for b in self.batches.values()):
            return "dropped"
        return "chosen" if node in self.nodes else "unknown"

    @property
    def text(self) -> str:
        """The state of the search, in a line."""
        if self.started is None:
            return "not started"
        if self.stopped is not None:
            return ("interrupted: " if self.stopped.interrupted else "finished: ") + self.stopped.reason
        faster, ahead = 2**-self.best_score, self.next_to_verify
        unsure = 2 ** -self.scores[ahead] if ahead else 0.0
        note = f" ({unsure:.3f}x is not verified in full yet)" if unsure > faster else ""
        return (
            f"batch {max(self.batches, default=0)}: sources {len(self.nodes)}, waiting {len(self.pool)}, "
            f"measurements {self.spent.measurements}, best {faster:.3f}x{note}"
        )

    def close(self, number: int) -> None:
        """Close a batch whose requests are all answered: new sources among the answers become nodes.

        Batches are closed in order, since what is new depends on what was accepted before. Does nothing for
        a batch that is closed.
        """
        batch = self.batch(number)
        if batch.closed:
            return
        batch.closed = True
        ids: list[str] = []
        for _, answer in sorted(batch.answers.items()):
            for node in answer.nodes:
                if node.id in self.nodes:
                    self.duplicates.append(node)
                    continue
                self.nodes[node.id] = node
                self.pool[node.id] = None
                ids.append(node.id)
        batch.nodes = tuple(ids)


def replay_events(events: Iterable[Event]) -> SearchState:
    """The state after these events. Raises `RecordError` for what is no event, or out of place."""
    state = SearchState()
    for event in events:
        apply_event(state, event)
    return state


def apply_event(state: SearchState, event: Event) -> SearchState:
    """Add an event to `state` (in place) and return it. An event that is known already is ignored.

    Raises `RecordError` for what is no event, or comes before what it rests on.
    """
    kind = type(event)
    if kind not in _HANDLERS:
        raise RecordError(f"{event!r:.80} is no event: one of {', '.join(k.__name__ for k in _HANDLERS)}")
    if kind is not Started and state.started is None:
        raise RecordError(f"a search's first event must be `started`, not {kind.__name__.lower()}")
    _HANDLERS[kind](state, event)
    return state


def _apply_started(state: SearchState, event: Started) -> None:
    if state.started is not None:
        return
    if not event.seeds:
        raise RecordError("a search needs at least one seed to start from, and to state speed-ups against")
    state.started = event
    for node in event.seeds:
        state.nodes[node.id] = node
    seeds = state.batch(0)
    seeds.closed, seeds.nodes = True, state.seeds
    ids = tuple(state.nodes)[: event.context.settings.budget.measurements]
    seeds.chosen = Chosen(0, ids, ("seed",) * len(ids), (1.0,) * len(ids))


def _apply_resumed(state: SearchState, event: Resumed) -> None:
    state.resumed += 1
    if state.stopped is not None and state.stopped.interrupted:
        state.stopped = None


def _apply_proposed(state: SearchState, event: Proposed) -> None:
    if event.request in state.answers:
        return
    batch = state.batch(event.batch)
    if batch.closed:
        raise RecordError(f"an answer to {event.request} came after batch {event.batch} was closed")
    state.answers[event.request] = batch.answers[event.request] = event
    _add_cost(state, "proposals", event.spent)


def _apply_forecasted(state: SearchState, event: Forecasted) -> None:
    batch = state.batch(event.batch)
    if batch.forecasted is not None:
        return
    state.close(event.batch)
    batch.forecasted = event
    for node, belief in event.beliefs.items():
        state.beliefs[node] = (event.reference, belief)
        state.expected_gains[node] = PRIOR_GAIN if belief.abstains else expected_improvement(belief)
    _add_cost(state, "forecasts", event.spent)


def _apply_chosen(state: SearchState, event: Chosen) -> None:
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
    # No other batch reads these facts, and this one has no more use for them.
    state.memo.pop(("forecast_request", event.batch), None)
    state.memo.pop(("proposal_requests", event.batch - state.settings.depth - 1), None)
    for node, reason in zip(event.nodes, event.reasons, strict=True):
        del state.pool[node]
        state.memo["reason", node] = reason


def _apply_finished(state: SearchState, event: Finished) -> None:
    if event.job in state.jobs:
        return
    batch, result = state.batch(event.batch), event.judged
    if batch.chosen is None or event.node not in batch.chosen.nodes:
        raise RecordError(f"{event.node} was judged in batch {event.batch}, which did not choose it")
    state.jobs.add(event.job)
    batch.finished[event.node] = state.judged[event.node] = result
    score: float | None = None
    if result.log2_ratio is not None:
        if event.node == state.seeds[0]:
            score = 0.0
        elif result.against in state.scores:
            score = state.scores[result.against] + result.log2_ratio
        else:
            raise RecordError(f"{event.node} was timed beside {result.against!r}, which has no score itself")
        state.scores[event.node] = batch.scores[event.node] = score
    _note_end(state, batch)
    _add_cost(state, "measurements", measurement_cost(result))
    before = state.history[-1].best if state.history else 0.0
    state.history.append(
        HistoryPoint(
            state.spent.measurements,
            event.node,
            event.batch,
            state.reason(event.node),
            score,
            before if score is None or not result.may_lead else min(before, score),
            state.spent_on["measurements"].device_seconds,
        )
    )


def _apply_lost(state: SearchState, event: Lost) -> None:
    if not event.node:
        state.lost_confirmations.append(event)
        return
    batch = state.batch(event.batch)
    losses = (state.lost_verifications if event.verification else batch.lost).setdefault(event.node, [])
    if event.job not in {e.job for e in losses}:  # every try has an id of its own
        losses.append(event)
        _note_end(state, batch)


def _note_end(state: SearchState, batch: Batch) -> None:
    """Note how many verifications there are when a batch ends: the log alone decides it."""
    if batch.ended and batch.verifications < 0:
        batch.verifications = len(state.verifications)


def _apply_verified(state: SearchState, event: Verified) -> None:
    if any(v.node == event.node for v in state.verifications):
        return
    if event.node not in state.scores:
        raise RecordError(f"{event.node} was verified in full, but it was not timed before")
    state.judged[event.node] = state.judged[event.node].with_verification(event.found)
    history = state.history
    if event.found.is_right:
        history[-1] = replace(history[-1], best=min(history[-1].best, state.scores[event.node]))
    else:
        del state.scores[event.node]
        place = next(n for n, point in enumerate(history) if point.node == event.node)
        history[place] = replace(history[place], score=None)
    state.verifications.append(event)
    cost = SearchCost(0, event.found.device_seconds, event.found.wall_seconds)
    _add_cost(state, "verification", cost)


def _apply_confirmed(state: SearchState, event: Confirmed) -> None:
    fresh = {n: j for n, j in event.judged.items() if n not in state.confirmed}
    if event.judged and not fresh:
        return
    state.confirmed |= fresh
    state.confirmations += 1
    cost = total_cost(SearchCost(0, j.device_seconds, j.wall_seconds) for j in fresh.values())
    _add_cost(state, "confirmation", cost)


def _apply_expired(state: SearchState, event: Expired) -> None:
    state.expired = state.expired or event


def _apply_stopped(state: SearchState, event: Stopped) -> None:
    if state.stopped is None:
        state.stopped = event


_HANDLERS: Mapping[type, Any] = {
    Started: _apply_started,
    Resumed: _apply_resumed,
    Proposed: _apply_proposed,
    Forecasted: _apply_forecasted,
    Chosen: _apply_chosen,
    Finished: _apply_finished,
    Lost: _apply_lost,
    Verified: _apply_verified,
    Confirmed: _apply_confirmed,
    Expired: _apply_expired,
    Stopped: _apply_stopped,
}


def _add_cost(state: SearchState, on: str, cost: SearchCost) -> None:
    state.spent_on[on] += cost
    state.spent += cost


# --- what a batch may know ---


@dataclass(frozen=True)
class BatchView:
    """The knowledge of a batch: the search so far, and what else decisions rest on."""

    batch: int
    nodes: Mapping[str, Node]
    seeds: tuple[str, ...]
    scores: Mapping[str, float]
    judged: Mapping[str, NodeResult]
    expansions: Mapping[str, int]
    exhausted_parents: frozenset[str]
    exhausted: Mapping[str, frozenset[str]]
    """Arms that have nothing more, by parent."""
    incumbent: str
    """Id of the best that may lead; ties go to the one accepted first."""
    spent: SearchCost
    """Proposals of the batches before; forecasts and results of the batches that it may know of."""
    stalled_batches: int
    """Batches it may know of, counted from the last, that gave no better node."""
    empty_batches: int
    """Batches before it, counted from the last, that gave no new node."""
    verifications: int = 0
    """The number of `Verified` that it may know of: those in the log when the batches that it may know of ended."""


def batch_view(state: SearchState, batch: int) -> BatchView:
    """The view of batch `batch` (from 1): the seeds, nodes of the batches before it, results of those up to
    `batch - depth`, and what full verification had said when these had ended.

    Raises `RecordError` where these are not there yet. Made from the view before it, and kept for a while.
    """
    views: dict[int, BatchView] = state.memo.setdefault("views", {})
    if batch not in views:
        start = max((b for b in views if b < batch), default=0)
        view = views[start] if start else _initial_view(state)
        for number in range(start + 1, batch + 1):
            view = views[number] = _advance(state, view, number)
        for old in [b for b in views if b < batch - state.settings.depth - 1]:
            del views[old]
    return views[batch]


def _initial_view(state: SearchState) -> BatchView:
    """The view before batch 1: the seeds, not judged yet."""
    seeds = state.seeds
    nodes = {n: state.nodes[n] for n in seeds}
    return BatchView(0, nodes, seeds, {}, {}, {}, frozenset(), {}, seeds[0], SearchCost(), 0, 0)


def _advance(state: SearchState, view: BatchView, number: int) -> BatchView:
    """The view of batch `number`, from that of the batch before."""
    if number > 1:
        view = _with_proposals(state, view, number - 1)
    latest = number - state.settings.depth
    if number == 1:
        view = _with_results(state, view, 0)
    if latest >= 1:
        view = _with_results(state, view, latest)
    return replace(view, batch=number)


def _with_proposals(state: SearchState, view: BatchView, number: int) -> BatchView:
    batch = state.batch(number)
    if not batch.closed:
        raise RecordError(f"batch {number + 1} follows batch {number}, whose proposals are not all there")
    expansions, exhausted = dict(view.expansions), dict(view.exhausted)
    for parent in sorted({a.parent for a in batch.answers.values()}):
        expansions[parent] = expansions.get(parent, 0) + 1
    for answer in batch.answers.values():
        if answer.exhausted:
            exhausted[answer.parent] = exhausted.get(answer.parent, frozenset()) | {answer.arm}
    arms = frozenset(state.context.arms)
    return replace(
        view,
        nodes={**view.nodes, **{n: state.nodes[n] for n in batch.nodes}},
        expansions=expansions,
        exhausted=exhausted,
        exhausted_parents=frozenset(p for p, parent_arms in exhausted.items() if parent_arms >= arms),
        spent=view.spent + batch.proposing_cost,
        empty_batches=0 if batch.nodes else view.empty_batches + 1,
    )


def _with_results(state: SearchState, view: BatchView, number: int) -> BatchView:
    batch = state.batch(number)
    if not batch.ended:
        raise RecordError(f"batch {number} has not ended, and batch {view.batch + 1} rests on its results")
    verifications = max(view.verifications, batch.verifications)
    results = {**view.judged, **dict(sorted(batch.finished.items()))}
    for event in state.verifications[:verifications]:
        if event.node in results:
            results[event.node] = results[event.node].with_verification(event.found)
    all_scores = {**view.scores, **dict(sorted(batch.scores.items()))}
    scores = {n: s for n, s in all_scores.items() if results[n].log2_ratio is not None}
    order = [n for n in view.nodes if n in scores and (n == view.seeds[0] or results[n].may_lead)]
    incumbent = min(order, key=lambda n: scores[n], default=view.incumbent)
    # A node that waits for its verification is progress already: else a search might end before its turn.
    better = min(scores.values()) < min(view.scores.values(), default=math.inf) - MIN_PROGRESS
    return replace(
        view,
        scores=scores,
        judged=results,
        incumbent=incumbent,
        spent=view.spent + batch.forecasting_cost + batch.measuring_cost,
        stalled_batches=0 if better or number == 0 else view.stalled_batches + 1,
        verifications=verifications,
    )
