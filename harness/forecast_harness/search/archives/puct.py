"""PUCT over the lineage tree by the best reward of direct children, after TTT-Discover and GPU Forecasters.

    score(s) = Q(s) + c * scale * P(s) * sqrt(1 + T) / (1 + n(s))

The reward of a node is its speed-up over the first seed (not its logarithm). Q is the best reward among
direct children once s was expanded, before that its own. `scale` is the range of rewards among nodes that
are no seeds, at least 1e-6. P(s) = (N - rank) / sum(N - rank) with rank 0 for the best of the N nodes in the
archive. n(s) counts expansions of s and of everything that descends from it, T all expansions. A batch takes
the highest scores in turn and never a node together with its ancestor.

Where this view of a search makes it differ from the published program:

- Counts are derived from the number of expansions per node, which includes batches under way: what a batch
  before has just expanded loses its bonus although its children are not known yet.
- An expansion counts whether or not a valid child came of it; there, failed ones count as well.
- What is measured enters the archive, as it does there with as many measurements as places per parent; an
  expanded node of which no child ran keeps its own reward as Q.
- With several parents, a node descends from the first.
- `spent_parents` are ranked, and never selected.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forecast_harness.search.archives.ancestry import ancestors, parent_of
from forecast_harness.search.interfaces import ArchiveView


@dataclass
class PuctArchive:
    """See the module."""

    name: str = "puct"
    c: float = 1.0
    """How much exploring counts."""
    capacity: int = 1000
    """Most nodes that are not seeds, by reward; seeds stay."""

    def select(self, view: ArchiveView, n: int, seed: int) -> Sequence[str]:
        """See `Archive`. There are fewer than `n` where every other node is kin of one selected."""
        scores = self.scores(view)
        ranked = sorted(scores, key=lambda id: (-scores[id], id))
        blocked: set[str] = set()
        chosen: list[str] = []
        for id in ranked:
            if len(chosen) == n:
                break
            above = set(ancestors(view.nodes, id))
            if id in view.exhausted_parents or id in blocked or above & set(chosen):
                continue
            chosen.append(id)
            blocked |= above
        return chosen

    def scores(self, view: ArchiveView) -> Mapping[str, float]:
        """The PUCT score of every node in the archive, spent ones included: they still rank."""
        rewards = {id: 2.0 ** -view.scores[id] for id in self._archive(view)}
        if not rewards:
            return {}
        seeds = set(view.seeds)
        born = [reward for id, reward in rewards.items() if id not in seeds]
        scale = max(1e-6, max(born) - min(born)) if born else 1e-6
        visits, total = _visits(view)
        best: dict[str, float] = {}
        for id, reward in rewards.items():
            above = parent_of(view.nodes[id])
            best[above] = max(reward, best.get(above, 0.0))
        ranked = sorted(rewards, key=lambda id: (-rewards[id], id))
        count = len(ranked)
        weights = count * (count + 1) / 2
        found = {}
        for rank, id in enumerate(ranked):
            value = best.get(id, rewards[id]) if visits[id] else rewards[id]
            prior = (count - rank) / weights
            bonus = self.c * scale * prior * math.sqrt(1 + total) / (1 + visits[id])
            found[id] = value + bonus
        return found

    def _archive(self, view: ArchiveView) -> list[str]:
        seeds = set(view.seeds)
        ran = [id for id in view.scores if id in view.nodes]
        born = sorted((id for id in ran if id not in seeds), key=lambda id: (view.scores[id], id))
        return [id for id in ran if id in seeds] + born[: self.capacity]


def _visits(view: ArchiveView) -> tuple[Counter[str], int]:
    """Expansions of each node and of all its descendants, and of all nodes together."""
    visits: Counter[str] = Counter()
    for id, times in view.expansions.items():
        if id in view.nodes:
            visits[id] += times
            for above in ancestors(view.nodes, id):
                visits[above] += times
    return visits, sum(times for id, times in view.expansions.items() if id in view.nodes)
