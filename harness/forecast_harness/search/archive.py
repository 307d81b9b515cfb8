"""Which nodes to expand next: pure functions of what a batch may know. Equal views give equal answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from forecast_autotune.errors import SettingsError
from forecast_harness.records import Node
from forecast_harness.search.state import BatchView

Archive: TypeAlias = Callable[[BatchView, int], list[str]]
"""From a view and `n` to up to `n` ids of nodes that ran and of which more may be made."""


def open_archive(name: str) -> Archive:
    """The archive of this name. Raises `SettingsError` listing those there are."""
    if name not in ARCHIVES:
        raise SettingsError(f"an archive must be one of {', '.join(ARCHIVES)}, not {name!r}")
    return ARCHIVES[name]


def greedy(view: BatchView, n: int) -> list[str]:
    """The `n` fastest nodes, equal ones by id."""
    left = [id for id in view.scores if id in view.nodes and id not in view.exhausted_parents]
    return sorted(left, key=lambda id: (view.scores[id], id))[:n]


def puct(view: BatchView, n: int) -> list[str]:
    """The highest `puct_scores` in turn, and never a node together with its ancestor.

    There are fewer than `n` where every other node is an ancestor or a descendant of one selected.
    """
    scores = puct_scores(view)
    ranked = sorted(scores, key=lambda id: (-scores[id], id))
    blocked: set[str] = set()
    chosen: list[str] = []
    for id in ranked:
        if len(chosen) == n:
            break
        above = set(_ancestors(view.nodes, id))
        if id in view.exhausted_parents or id in blocked or above & set(chosen):
            continue
        chosen.append(id)
        blocked |= above
    return chosen


_CAPACITY = 1000
"""Nodes in the archive of `puct_scores`, besides the seeds."""
ARCHIVES: Mapping[str, Archive] = {"puct": puct, "greedy": greedy}


def puct_scores(view: BatchView) -> dict[str, float]:
    """PUCT over the lineage tree by the best reward of direct children, after TTT-Discover and GPU Forecasters.

        score(s) = Q(s) + scale * P(s) * sqrt(1 + T) / (1 + n(s))

    The reward of a node is its speed-up over the first seed (not its logarithm). Q is the best reward among
    direct children once s was expanded, before that its own. `scale` is the range of rewards among nodes that
    are no seeds, at least 1e-6. P(s) = (N - rank) / sum(N - rank) with rank 0 for the best of the N nodes in the
    archive: all seeds, and the best thousand of the others. n(s) counts expansions of s and of everything that
    descends from it, T all expansions.

    Where this view of a search makes it differ from the published program:

    - Counts are derived from the number of expansions per node, which includes batches under way: what a batch
      before has just expanded loses its bonus although its children are not known yet.
    - An expansion counts whether or not a valid child came of it; there, failed ones count as well.
    - What is measured enters the archive, as it does there with as many measurements as places per parent; an
      expanded node of which no child ran keeps its own reward as Q.
    - With several parents, a node descends from the first.
    - Nodes of which nothing more can be made are ranked, and never selected.
    """
    seeds = set(view.seeds)
    ran = [id for id in view.scores if id in view.nodes]
    children = sorted((id for id in ran if id not in seeds), key=lambda id: (view.scores[id], id))
    archive = [id for id in ran if id in seeds] + children[:_CAPACITY]
    rewards = {id: 2.0 ** -view.scores[id] for id in archive}
    others = [reward for id, reward in rewards.items() if id not in seeds]
    scale = max(1e-6, max(others) - min(others)) if others else 1e-6
    visits: Counter[str] = Counter()
    for id, times in view.expansions.items():
        for expanded in (id, *_ancestors(view.nodes, id)) if id in view.nodes else ():
            visits[expanded] += times
    total = sum(times for id, times in view.expansions.items() if id in view.nodes)
    best: dict[str, float] = {}
    for id, reward in rewards.items():
        above = _parent_of(view.nodes[id])
        best[above] = max(reward, best.get(above, 0.0))
    count = len(rewards)
    scores = {}
    for rank, id in enumerate(sorted(rewards, key=lambda id: (-rewards[id], id))):
        value = best.get(id, rewards[id]) if visits[id] else rewards[id]
        prior = (count - rank) / (count * (count + 1) / 2)
        scores[id] = value + scale * prior * math.sqrt(1 + total) / (1 + visits[id])
    return scores


def _parent_of(node: Node) -> str:
    """Id of the node it was derived from; empty for a seed. Other parents only lent parts of their text."""
    return node.parents[0] if node.parents else ""


def _ancestors(nodes: Mapping[str, Node], id: str) -> Iterator[str]:
    """Ids from the parent up to the seed."""
    seen = {id}
    above = _parent_of(nodes[id])
    while above in nodes and above not in seen:
        seen.add(above)
        yield above
        above = _parent_of(nodes[above])
