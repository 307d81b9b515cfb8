"""What full verification, which goes on beside the batches, changes of what is known of a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from forecast_autotune.errors import RecordError
from forecast_harness.records import MIN_PROGRESS, NodeResult
from forecast_harness.search.history.batches import MAX_RETRIES, HistoryPoint
from forecast_harness.search.history.events import Lost, Verified


def apply_verified(
    event: Verified,
    judged: dict[str, NodeResult],
    scores: dict[str, float],
    history: list[HistoryPoint],
) -> None:
    """A node may lead, or has failed after all; changes what it is given.

    Raises `RecordError` for a node that never ran.
    """
    if event.node not in scores:
        raise RecordError(f"{event.node} was verified in full, but it was not timed before")
    judged[event.node] = judged[event.node].with_verification(event.found)
    if event.found.is_right:
        history[-1] = replace(history[-1], best=min(history[-1].best, scores[event.node]))
        return
    del scores[event.node]
    place = next(n for n, point in enumerate(history) if point.node == event.node)
    history[place] = replace(history[place], score=None)


def fastest_unverified(
    scores: Mapping[str, float],
    judged: Mapping[str, NodeResult],
    lost: Mapping[str, Sequence[Lost]],
    order: Mapping[str, object],
    best: float,
) -> str:
    """Id of the fastest node that has to be verified in full before it may lead, and would lead; '' without one.

    `lost`: verifications whose lane failed. One that is hardly ahead of `best`, the score of the fastest that may
    lead, counts as equal. Of equal ones the first of `order` is taken.
    """
    waiting = [
        n
        for n, score in scores.items()
        if score < best - MIN_PROGRESS and not judged[n].may_lead and len(lost.get(n, ())) <= MAX_RETRIES
    ]
    if len(waiting) > 1:
        least = min(scores[n] for n in waiting)
        equal = {n for n in waiting if scores[n] == least}
        return next(n for n in order if n in equal)
    return waiting[0] if waiting else ""
