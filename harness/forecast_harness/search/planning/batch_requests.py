"""What a batch asks: requests to the proposers, and the question to the forecaster. Fixed by its view."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeVar

from forecast_autotune.records import digest
from forecast_harness.records import Node, ProposalRequest
from forecast_harness.search.archives import open_archive
from forecast_harness.search.history.batch_view import BatchView, batch_view
from forecast_harness.search.history.events import NodeForecastRequest
from forecast_harness.search.history.state import SearchState
from forecast_harness.search.planning.bandit import allocate

T = TypeVar("T")
MAX_FAILURES = 8
"""Failed children told to a proposer, the newest."""
CROSSOVER_PARTNERS = 2
"""Other good nodes given along with a parent, for crossovers."""


def proposal_requests(state: SearchState, number: int) -> tuple[ProposalRequest, ...]:
    """What a batch asks of the proposers: fixed by its view. Empty where no parent is left."""
    return _memoized(state, ("requests", number), lambda: tuple(_proposal_requests(state, number)))


def _memoized(state: SearchState, name: tuple[str, int], make: Callable[[], T]) -> T:
    if name not in state.memo:
        state.memo[name] = make()
    found: T = state.memo[name]
    return found


def _proposal_requests(state: SearchState, number: int) -> Iterator[ProposalRequest]:
    seen, s = batch_view(state, number), state.settings
    seed = int(digest("batch", s.seed, number)[:8], 16)
    picked = open_archive(s.archive).select(seen, s.parents, seed)
    able = [p for p in dict.fromkeys(picked) if p in seen.scores and p not in seen.exhausted_parents]
    ranked = sorted(seen.scores, key=lambda n: seen.scores[n])
    known = tuple(seen.nodes)
    for parent in able[: s.parents]:
        arms = [a for a in state.context.arms if a not in seen.exhausted.get(parent, ())]
        others = [n for n in (*able, *ranked[: CROSSOVER_PARTNERS + 1]) if n != parent]
        failures = _failed_children(seen, parent)
        parents = tuple(seen.nodes[n] for n in (parent, *list(dict.fromkeys(others))[:CROSSOVER_PARTNERS]))
        told = {n.id: seen.judged[n.id] for n in (*parents, *failures) if n.id in seen.judged}
        for arm, n in allocate(arms, seen.arms, s.samples, (s.seed, number, parent)).items():
            name = digest(s.seed, number, [p.id for p in parents], arm)
            yield ProposalRequest(
                id=f"{number:04d}-{name}",
                batch=number,
                arm=arm,
                target=state.target,
                parents=parents,
                judged=told,
                score=seen.scores[parent],
                n=n,
                seed=int(name[:8], 16),
                failures=failures,
                known=known,
            )


def _failed_children(seen: BatchView, parent: str) -> tuple[Node, ...]:
    """Children that were refused or slower than their parent."""
    found = [
        seen.nodes[n]
        for n in seen.judged
        if seen.nodes[n].parents[:1] == (parent,)
        and seen.scores.get(n, seen.scores[parent] + 1.0) > seen.scores[parent]
    ]
    order = {n: i for i, n in enumerate(seen.nodes)}
    return tuple(sorted(found, key=lambda n: order[n.id])[-MAX_FAILURES:])


def selectable_nodes(state: SearchState, number: int) -> list[str]:
    """Nodes that a batch may choose, new and deferred, in the order in which they were accepted."""
    return [n for n in state.pool if state.nodes[n].batch <= number]


def forecast_request(state: SearchState, number: int) -> NodeForecastRequest | None:
    """New nodes, and of those deferred before the most promising, twice as many as a batch may propose.

    None where there is nothing to ask about. Fixed from the moment at which the batch before has chosen.
    """
    return _memoized(state, ("question", number), lambda: _forecast_request(state, number))


def _forecast_request(state: SearchState, number: int) -> NodeForecastRequest | None:
    nodes = selectable_nodes(state, number)
    if not nodes:
        return None
    seen, s = batch_view(state, number), state.settings
    fresh = set(state.batch(number).nodes)
    # What was never forecast comes first: nothing is known against it.
    old = sorted((n for n in nodes if n not in fresh), key=lambda n: -state.expected_gains.get(n, math.inf))
    kept = set(old[: 2 * s.parents * s.samples])
    return NodeForecastRequest(
        batch=number,
        reference=seen.nodes[seen.incumbent],
        nodes=tuple(state.nodes[n] for n in nodes if n in fresh or n in kept),
        judged=tuple(
            (seen.nodes[n], j, seen.scores.get(n, seen.scores[j.against])) for n, j in seen.judged.items()
        ),
        lineage={n: node.parents for n, node in seen.nodes.items()},
        target=state.target,
    )
