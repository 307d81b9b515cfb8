"""What a batch may know: equal for all orders in which results can come, and fixed by the log for verifications."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from forecast_autotune.errors import RecordError
from forecast_harness.records import MIN_PROGRESS, Node, NodeResult, SearchCost
from forecast_harness.search.history.batches import ArmStats, arm_stats
from forecast_harness.search.history.state import SearchState


@dataclass(frozen=True)
class BatchView:
    """What a batch may know: an `interfaces.View`, and what else decisions rest on."""

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
    arms: Mapping[str, ArmStats]
    """Of the batches that it may know of."""
    spent: SearchCost
    """Proposals of the batches before; forecasts and results of the batches that it may know of."""
    stalled_batches: int
    """How many of the batches it may know of, counted from the last, gave no better node."""
    empty_batches: int
    """How many of the batches before, counted from the last, gave no new node."""
    verifications: int = 0
    """How many of the first `Verified` it may know of: those in the log when the batches that it may know of ended."""


def batch_view(state: SearchState, batch: int) -> BatchView:
    """What batch `batch` (from 1) may know: the seeds, nodes of the batches before it, results of those up to
    `batch - depth`, and what full verification had said when these had ended.

    Raises `RecordError` where these are not there yet. Made from the view before it, and kept for a while.
    """
    kept: dict[int, BatchView] = state.memo.setdefault("views", {})
    if batch not in kept:
        start = max((b for b in kept if b < batch), default=0)
        seen = kept[start] if start else _initial_view(state)
        for number in range(start + 1, batch + 1):
            seen = kept[number] = _advance(state, seen, number)
        for old in [b for b in kept if b < batch - state.settings.depth - 1]:
            del kept[old]
    return kept[batch]


def _initial_view(state: SearchState) -> BatchView:
    """Of the time before batch 1: the seeds, not judged yet."""
    seeds = state.seeds
    nodes = {n: state.nodes[n] for n in seeds}
    return BatchView(0, nodes, seeds, {}, {}, {}, frozenset(), {}, seeds[0], {}, SearchCost(), 0, 0)


def _advance(state: SearchState, seen: BatchView, number: int) -> BatchView:
    """The view of batch `number`, from that of the batch before."""
    if number > 1:
        seen = _with_proposals(state, seen, number - 1)
    known = number - state.settings.depth
    if number == 1:
        seen = _with_results(state, seen, 0)
    if known >= 1:
        seen = _with_results(state, seen, known)
    return replace(seen, batch=number)


def _with_proposals(state: SearchState, seen: BatchView, number: int) -> BatchView:
    batch = state.batch(number)
    if not batch.closed:
        raise RecordError(f"batch {number + 1} follows batch {number}, whose proposals are not all there")
    expansions, exhausted = dict(seen.expansions), dict(seen.exhausted)
    for parent in sorted({a.parent for a in batch.answers.values()}):
        expansions[parent] = expansions.get(parent, 0) + 1
    for answer in batch.answers.values():
        if answer.exhausted:
            exhausted[answer.parent] = exhausted.get(answer.parent, frozenset()) | {answer.arm}
    arms = frozenset(state.context.arms)
    return replace(
        seen,
        nodes={**seen.nodes, **{n: state.nodes[n] for n in batch.nodes}},
        expansions=expansions,
        exhausted=exhausted,
        exhausted_parents=frozenset(p for p, done in exhausted.items() if done >= arms),
        spent=seen.spent + batch.proposing_cost,
        empty_batches=0 if batch.nodes else seen.empty_batches + 1,
    )


def _with_results(state: SearchState, seen: BatchView, number: int) -> BatchView:
    batch = state.batch(number)
    if not batch.ended:
        raise RecordError(f"batch {number} has not ended, and batch {seen.batch + 1} rests on its results")
    verifications = max(seen.verifications, batch.verifications)
    judged = {**seen.judged, **dict(sorted(batch.finished.items()))}
    for event in state.verifications[:verifications]:
        if event.node in judged:
            judged[event.node] = judged[event.node].with_verification(event.found)
    timed = {**seen.scores, **dict(sorted(batch.scores.items()))}
    scores = {n: s for n, s in timed.items() if judged[n].log2_ratio is not None}
    order = [n for n in seen.nodes if n in scores and (n == seen.seeds[0] or judged[n].may_lead)]
    incumbent = min(order, key=lambda n: scores[n], default=seen.incumbent)
    # What waits for its verification is progress already: else a search might end before its turn.
    better = min(scores.values()) < min(seen.scores.values(), default=math.inf) - MIN_PROGRESS
    refused = any(n not in scores for n in seen.scores)
    arms = {} if refused else dict(seen.arms)
    for known in range(1, number + 1) if refused else (number,):
        for arm, stats in arm_stats(state.batch(known), state.nodes, judged).items():
            arms[arm] = arms.get(arm, ArmStats()) + stats
    return replace(
        seen,
        scores=scores,
        judged=judged,
        incumbent=incumbent,
        arms=arms,
        spent=seen.spent + batch.forecasting_cost + batch.measuring_cost,
        stalled_batches=0 if better or number == 0 else seen.stalled_batches + 1,
        verifications=verifications,
    )
