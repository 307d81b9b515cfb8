"""Baselines: the best nodes again and again, and a beam that goes down generation by generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forecast_harness.search.archives.ancestry import ancestors, expandable_nodes
from forecast_harness.search.interfaces import ArchiveView


@dataclass
class GreedyArchive:
    """The `n` fastest nodes."""

    name: str = "greedy"

    def select(self, view: ArchiveView, n: int, seed: int) -> Sequence[str]:
        """See `Archive`."""
        return expandable_nodes(view)[:n]


@dataclass
class BeamArchive:
    """The fastest `width` nodes of every generation are expanded once, older generations first.

    When all were, the least often expanded nodes follow, faster ones first.
    """

    name: str = "beam"
    width: int = 4

    def select(self, view: ArchiveView, n: int, seed: int) -> Sequence[str]:
        """See `Archive`."""
        generation = {id: sum(1 for _ in ancestors(view.nodes, id)) for id in view.scores if id in view.nodes}
        beams: dict[int, list[str]] = {}
        for id in sorted(generation, key=lambda id: (view.scores[id], id)):
            beams.setdefault(generation[id], []).append(id)
        kept = {id for beam in beams.values() for id in beam[: self.width]}

        def order(id: str) -> tuple[bool, int, int, float, str]:
            times = view.expansions.get(id, 0)
            waiting = id in kept and not times
            return not waiting, times, generation[id] if waiting else 0, view.scores[id], id

        return sorted(expandable_nodes(view), key=order)[:n]
