"""Islands of elites: populations that meet now and then, each keeping its best node of every kind.

Everything follows from the nodes, so nothing has to be remembered. Seeds live on all islands; a child on one
of the islands its parent lived on when it was made, drawn by its id. Every `period` batches the best node of
each island also moves to the next one. Within an island, the fastest node of each cell of `behaviour` may
become a parent. Islands take turns; a parent is drawn by rank among the elites, the first ones more often.

Results that come in late can change who was the best at an earlier migration, and with it where later nodes
live: the answer is still a function of the view alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forecast_autotune.records import digest
from forecast_harness.search.archives.ancestry import expandable_nodes, parent_of
from forecast_harness.search.archives.behaviour import BehaviourCell, behaviour_cell
from forecast_harness.search.interfaces import ArchiveView


@dataclass
class IslandArchive:
    """See the module."""

    name: str = "islands"
    count: int = 4
    """Islands."""
    period: int = 4
    """Batches between migrations."""
    rank_decay: float = 0.7
    """The chance of an elite to be drawn, as a share of the one before it in rank."""

    def select(self, view: ArchiveView, n: int, seed: int) -> Sequence[str]:
        """See `Archive`."""
        homes = self.islands_of(view)
        left = expandable_nodes(view)
        chance = random.Random(digest(seed, n))
        turn = sum(view.expansions.values())
        chosen: list[str] = []
        while len(chosen) < min(n, len(left)):
            elites: list[str] = []
            for island in range(turn, turn + self.count):
                here = [id for id in left if island % self.count in homes[id] and id not in chosen]
                if elites := self._elites(view, here):
                    break
            if not elites:
                break
            weights = [self.rank_decay**rank for rank in range(len(elites))]
            chosen += chance.choices(elites, weights)
            turn += 1
        return chosen

    def islands_of(self, view: ArchiveView) -> Mapping[str, frozenset[int]]:
        """The islands that every node lives on."""
        homes: dict[str, frozenset[int]] = {}
        moved: dict[str, frozenset[int]] = {}
        done = 0
        for id, node in sorted(view.nodes.items(), key=lambda item: (item[1].batch, item[0])):
            while (done + 1) * self.period <= node.batch:
                done += 1
                self._migrate(view, homes, moved)
            above = parent_of(node)
            open_to = homes.get(above, frozenset()) | moved.get(above, frozenset())
            if open_to:
                listed = sorted(open_to)
                homes[id] = frozenset((listed[int(digest(id)[:8], 16) % len(listed)],))
            else:
                homes[id] = frozenset(range(self.count))
        return {id: islands | moved.get(id, frozenset()) for id, islands in homes.items()}

    def _migrate(
        self, view: ArchiveView, homes: Mapping[str, frozenset[int]], moved: dict[str, frozenset[int]]
    ) -> None:
        """The best of each island so far moves to the next one, too."""
        ranked = sorted((id for id in homes if id in view.scores), key=lambda id: (view.scores[id], id))
        for island in range(self.count):
            best = next((id for id in ranked if island in homes[id]), None)
            if best is not None:
                moved[best] = moved.get(best, frozenset()) | {(island + 1) % self.count}

    def _elites(self, view: ArchiveView, ids: Sequence[str]) -> list[str]:
        """The first of each cell; `ids` are in the order of speed."""
        best: dict[BehaviourCell, str] = {}
        for id in ids:
            best.setdefault(behaviour_cell(view.nodes[id], view.judged.get(id)), id)
        return list(best.values())
