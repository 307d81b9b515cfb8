"""The lineage tree: which nodes are drawn, and where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass

from forecast_harness.search.report.report_model import ReportNode, SearchReport

MAX_DRAWN_NODES = 400
"""So many nodes can still be told apart; the rest are counted at their parents."""
COLUMN, ROW, MARGIN = 78.0, 22.0, 22.0


@dataclass(frozen=True)
class DrawnNode:
    """A drawn node."""

    entry: ReportNode
    x: float
    y: float
    parent: str
    """The drawn node that it hangs on; empty for a root."""
    hidden: int
    """How many of its children are not drawn."""


@dataclass(frozen=True)
class LineageDrawing:
    """A drawing of the lineage; the root is at the left, each generation a column."""

    leaves: tuple[DrawnNode, ...]
    edges: tuple[tuple[str, str], ...]
    """(path, class): `line` towards the best node is `best`."""
    width: float
    height: float
    total: int

    @property
    def thinned(self) -> bool:
        """Whether nodes were left out."""
        return len(self.leaves) < self.total


def path_to_root(story: SearchReport, name: str, known: Container[str] = ()) -> list[str]:
    """The node and its ancestors by first parents, youngest first, up to the first one that is `known`."""
    found: dict[str, None] = {}
    while name in story.entries and name not in found and name not in known:
        found[name] = None
        parents = story.entries[name].node.parents
        name = parents[0] if parents else ""
    return list(found)


def by_importance(story: SearchReport) -> list[str]:
    """All node ids, what a reader needs most first: ends and their ancestors, then by what is known."""
    final = story.final
    ends = [*([final.node] if final else []), *sorted(story.confirmed), *story.context.seeds]
    first = [n for end in ends for n in path_to_root(story, end)]
    rank = {"seed": 0, "faster": 1, "slower": 2, "failed": 3, "waiting": 4}

    def key(entry: ReportNode) -> tuple[int, float, int]:
        return rank[entry.kind], entry.score or 0.0, -entry.number

    rest = sorted(story.entries.values(), key=key)
    return list(dict.fromkeys([*first, *(e.node.id for e in rest)]))


def draw_lineage(story: SearchReport, most: int = MAX_DRAWN_NODES) -> LineageDrawing:
    """Lay out up to `most` nodes; a node is drawn only with all its ancestors."""
    shown: dict[str, None] = {}
    for name in by_importance(story):
        line = path_to_root(story, name, shown)
        if len(shown) + len(line) <= most:
            shown.update(dict.fromkeys(line))
    children = _drawn_children(story, shown)
    hidden: dict[str, int] = defaultdict(int)
    for name, entry in story.entries.items():
        if name not in shown and entry.node.parents:
            hidden[entry.node.parents[0]] += 1
    places = _node_positions(children)
    final = story.final
    golden = set(path_to_root(story, final.node)) if final else set()
    leaves, edges = [], []
    for parent, names in children.items():
        for name in names:
            x, y = places[name]
            leaves.append(DrawnNode(story.entries[name], x, y, parent, hidden[name]))
            if parent:
                from_x, from_y = places[parent]
                bend = (from_x + x) / 2
                path = f"M{from_x:g} {from_y:g}C{bend:g} {from_y:g} {bend:g} {y:g} {x:g} {y:g}"
                edges.append((path, "best" if name in golden else "edge"))
    edges.sort(key=lambda edge: edge[1] == "best")
    width = max((x for x, _ in places.values()), default=0.0) + MARGIN + 40
    height = max((y for _, y in places.values()), default=0.0) + MARGIN
    leaves.sort(key=lambda leaf: (leaf.x, leaf.y))
    return LineageDrawing(tuple(leaves), tuple(edges), width, height, len(story.entries))


def _drawn_children(story: SearchReport, shown: Mapping[str, None]) -> dict[str, list[str]]:
    """Drawn children by their parent, oldest first; roots under the empty name."""
    found: dict[str, list[str]] = {"": []}
    for name in sorted(shown, key=lambda n: story.entries[n].number):
        parents = story.entries[name].node.parents
        found.setdefault(parents[0] if parents and parents[0] in shown else "", []).append(name)
    return found


def _node_positions(children: Mapping[str, list[str]]) -> dict[str, tuple[float, float]]:
    """A row for each childless node; others lie amid their children. No recursion: chains are long."""
    places: dict[str, tuple[float, float]] = {}
    row = 0
    todo = [(name, 0, False) for name in reversed(children[""])]
    while todo:
        name, depth, done = todo.pop()
        own = children.get(name, [])
        x = MARGIN + depth * COLUMN
        if not own:
            places[name] = (x, MARGIN + row * ROW)
            row += 1
        elif done:
            ys = [places[n][1] for n in own]
            places[name] = (x, (ys[0] + ys[-1]) / 2)
        else:
            todo.append((name, depth, True))
            todo += [(n, depth + 1, False) for n in reversed(own)]
    return places
