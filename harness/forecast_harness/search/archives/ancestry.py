"""The tree of first parents: who descends from whom, and who may still be expanded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from forecast_harness.records import Node
from forecast_harness.search.interfaces import ArchiveView


def parent_of(node: Node) -> str:
    """Id of the node it was derived from; empty for a seed. Other parents only lent parts of their text."""
    return node.parents[0] if node.parents else ""


def ancestors(nodes: Mapping[str, Node], id: str) -> Iterator[str]:
    """Ids from the parent up to the seed."""
    seen = {id}
    above = parent_of(nodes[id])
    while above in nodes and above not in seen:
        seen.add(above)
        yield above
        above = parent_of(nodes[above])


def expandable_nodes(view: ArchiveView) -> list[str]:
    """Ids of nodes that ran and of which more may be made; best first, equal ones by id."""
    left = [id for id in view.scores if id in view.nodes and id not in view.exhausted_parents]
    return sorted(left, key=lambda id: (view.scores[id], id))
