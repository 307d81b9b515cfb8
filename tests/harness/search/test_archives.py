"""Which nodes are expanded: PUCT against values worked out by hand, islands, greedy and beam."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from forecast_autotune.errors import SettingsError
from forecast_autotune.records import Outcome
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.records import Node, NodeResult
from forecast_harness.search.archives import ARCHIVES, open_archive
from forecast_harness.search.archives.behaviour import behaviour_cell
from forecast_harness.search.archives.greedy import BeamArchive
from forecast_harness.search.archives.islands import IslandArchive
from forecast_harness.search.archives.puct import PuctArchive


@dataclass
class StubView:
    """A `View` from a table of (id, parent, speed-up, batch)."""

    nodes: Mapping[str, Node]
    seeds: Sequence[str]
    scores: Mapping[str, float]
    judged: Mapping[str, NodeResult] = field(default_factory=dict)
    expansions: Mapping[str, int] = field(default_factory=dict)
    exhausted_parents: frozenset[str] = frozenset()


def stub_view(
    rows: Sequence[tuple[str, str, float | None, int]],
    expansions: Mapping[str, int] | None = None,
    spent: Sequence[str] = (),
    sources: Mapping[str, str] | None = None,
) -> StubView:
    made = Provenance(Origin.HAND)
    nodes = {
        id: Node(
            id, (sources or {}).get(id, f"# {id}"), "torch", (parent,) if parent else (), made, batch=batch
        )
        for id, parent, _, batch in rows
    }
    scores = {id: -math.log2(speed) for id, _, speed, _ in rows if speed is not None}
    seeds = [id for id, parent, _, _ in rows if not parent]
    judged = {id: NodeResult(Outcome.OK, log2_ratio=score) for id, score in scores.items()}
    return StubView(nodes, seeds, scores, judged, expansions or {}, frozenset(spent))


TREE = [
    ("seed", "", 1.0, 0),
    ("a", "seed", 2.0, 1),
    ("b", "seed", 1.5, 1),
    ("broken", "seed", None, 1),
    ("aa", "a", 1.8, 2),
]


def test_puct_is_the_formula() -> None:
    """Every term worked out by hand: T = 3, N = 4, rewards of non-seeds from 1.5 to 2."""
    found = PuctArchive(c=2.0).scores(stub_view(TREE, {"seed": 1, "a": 2}))
    bonus = 2.0 * 0.5 * math.sqrt(1 + 3)
    # Ranks: a (2.0), aa (1.8), b (1.5), seed (1.0); shares 4, 3, 2, 1 of 10. Visits: the seed 1 + 2, a 2.
    assert found == pytest.approx(
        {
            "seed": 2.0 + bonus * 0.1 / (1 + 3),
            "a": 1.8 + bonus * 0.4 / (1 + 2),
            "b": 1.5 + bonus * 0.2,
            "aa": 1.8 + bonus * 0.3,
        }
    )


def test_an_expanded_node_without_a_child_that_ran_keeps_its_own_reward() -> None:
    rows = [("seed", "", 1.0, 0), ("a", "seed", 3.0, 1), ("broken", "a", None, 2)]
    found = PuctArchive().scores(stub_view(rows, {"a": 1}))
    # One node that is no seed: rewards have no range, so the bonus is all but nothing.
    assert found["a"] == pytest.approx(3.0, abs=1e-5)
    assert found["seed"] == pytest.approx(3.0, abs=1e-5), "expanded through its child: its best child counts"


def test_puct_takes_no_node_with_its_kin() -> None:
    view = stub_view(TREE)
    ranked = sorted(PuctArchive().scores(view).items(), key=lambda item: -item[1])
    assert [id for id, _ in ranked] == ["a", "aa", "b", "seed"]
    assert PuctArchive().select(view, 4, 0) == ["a", "b"], (
        "aa descends from a, and the seed is everyone's ancestor"
    )
    assert PuctArchive().select(view, 1, 0) == ["a"]


def test_a_late_descendant_is_blocked_by_its_ancestor() -> None:
    rows = [
        ("seed", "", 1.0, 0),
        ("x", "seed", None, 1),
        ("y", "seed", 1.2, 1),
        ("z", "y", 1.1, 2),
        ("zz", "z", 1.4, 3),
    ]
    # zz is best; z and y above it are blocked although z is between them and the seed.
    assert PuctArchive().select(stub_view(rows), 4, 0) == ["zz"]


def test_puct_moves_on_when_a_node_is_expanded_often() -> None:
    rows = [("seed", "", 1.0, 0), ("a", "seed", 1.3, 1), ("b", "seed", 1.29, 1), ("aa", "a", 1.2, 2)]
    assert PuctArchive().select(stub_view(rows), 1, 0) == ["a"]
    assert PuctArchive().select(stub_view(rows, {"a": 4}), 1, 0) == ["b"]


def test_seeds_stay_when_the_archive_is_full() -> None:
    rows = [("seed", "", 1.0, 0), *((f"n{i}", "seed", 2.0 + i, 1) for i in range(5))]
    assert set(PuctArchive(capacity=2).scores(stub_view(rows))) == {"seed", "n4", "n3"}


@pytest.mark.parametrize("name", sorted(ARCHIVES))
def test_every_archive_obeys_the_protocol(name: str) -> None:
    archive = open_archive(name)
    assert archive.name == name
    rows = [
        ("seed", "", 1.0, 0),
        *((f"n{i}", "seed", 1.0 + i % 3, 1) for i in range(6)),
        ("bad", "seed", None, 1),
    ]
    view = stub_view(rows, spent=["n5"])
    for n in (1, 3, 20):
        picked = list(archive.select(view, n, 7))
        assert picked == list(archive.select(stub_view(rows, spent=["n5"]), n, 7)), (
            "equal views, equal answers"
        )
        assert len(set(picked)) == len(picked) <= n
        assert picked
        assert not {"bad", "n5"} & set(picked), "what did not run or is spent is not expanded"
    assert len(archive.select(view, 20, 7)) == (5 if name == "puct" else 6)
    assert archive.select(stub_view([("seed", "", 1.0, 0)], spent=["seed"]), 2, 7) == []


@pytest.mark.parametrize("name", ["greedy", "beam", "puct"])
def test_equal_nodes_are_taken_by_id(name: str) -> None:
    rows = [("seed", "", 1.0, 0), ("c", "seed", 2.0, 1), ("a", "seed", 2.0, 1), ("b", "seed", 2.0, 1)]
    view = stub_view(rows, {"seed": 1})
    assert list(open_archive(name).select(view, 2, 0)) == ["a", "b"]


def test_an_unknown_archive_is_refused() -> None:
    with pytest.raises(SettingsError, match="one of puct, islands, greedy, beam, not 'best'"):
        open_archive("best")


def test_greedy_takes_the_fastest() -> None:
    assert list(open_archive("greedy").select(stub_view(TREE, {"a": 9}), 2, 0)) == ["a", "aa"]


def test_a_beam_goes_down_generation_by_generation() -> None:
    rows = [
        ("seed", "", 1.0, 0),
        *((f"g{i}", "seed", 1.0 + i / 10, 1) for i in range(4)),
        ("h", "g3", 2.0, 2),
    ]
    beam = BeamArchive(width=2)
    assert list(beam.select(stub_view(rows), 9, 0))[:4] == ["seed", "g3", "g2", "h"]
    once = {"seed": 1, "g3": 1, "g2": 1}
    assert list(beam.select(stub_view(rows, once), 1, 0)) == ["h"]
    left = beam.select(stub_view(rows, {**once, "h": 1}), 1, 0)
    assert left == ["g1"], "then what was expanded least"


def test_children_live_where_their_parents_lived() -> None:
    rows = [("seed", "", 1.0, 0), *((f"n{i:02d}", "seed", 1.0, 1) for i in range(40))]
    rows += [(f"m{i:02d}", f"n{i:02d}", 1.0, 2) for i in range(40)]
    homes = IslandArchive(count=4, period=100).islands_of(stub_view(rows))
    assert homes["seed"] == {0, 1, 2, 3}
    assert {i for n in range(40) for i in homes[f"n{n:02d}"]} == {0, 1, 2, 3}, "a seed's children spread"
    assert all(homes[f"m{i:02d}"] == homes[f"n{i:02d}"] for i in range(40))
    assert all(len(homes[f"n{i:02d}"]) == 1 for i in range(40))


def test_the_best_of_an_island_moves_on_at_a_migration() -> None:
    rows = [("seed", "", 1.0, 0), *((f"n{i}", "seed", 2.0 + i, 1) for i in range(8))]
    before = IslandArchive(count=2, period=3).islands_of(stub_view(rows))
    after = IslandArchive(count=2, period=3).islands_of(stub_view([*rows, ("late", "seed", 1.0, 3)]))
    for island in (0, 1):
        best = max((id for id in before if island in before[id] and id != "seed"), key=lambda id: int(id[1]))
        assert before[best] == {island}
        assert after[best] == {0, 1}
    stayed = [id for id in before if id != "seed" and after[id] == before[id]]
    assert len(stayed) == 6, "only one of each island moved"


def test_islands_keep_the_best_of_every_kind() -> None:
    """Two kinds of source on one island: the slow kind is expanded too, its slower twin is not."""
    loop, flat = (
        "def run(x):\n    for i in range(3):\n        x = x @ x\n    return x\n",
        "def run(x):\n    return x\n",
    )
    rows = [
        ("seed", "", 1.0, 0),
        ("fast", "seed", 9.0, 1),
        ("same", "seed", 8.0, 1),
        ("other", "seed", 1.1, 1),
    ]
    sources = {"seed": flat, "fast": flat, "same": flat, "other": loop}
    picked = {
        IslandArchive(count=1).select(stub_view(rows, {"seed": t}, sources=sources), 1, t)[0]
        for t in range(40)
    }
    assert picked == {"fast", "other"}


def test_other_seeds_draw_other_elites() -> None:
    rows = [("seed", "", 1.0, 0), *((f"n{i}", "seed", 2.0, 1) for i in range(4))]
    sources = {f"n{i}": "X = 1\n" + "x @ x\n" * i + f"BLOCK = {8 << (2 * i)}\n" for i in range(4)}
    view = stub_view(rows, sources=sources)
    drawn = [IslandArchive(count=1).select(view, 1, seed) for seed in range(30)]
    assert len({tuple(d) for d in drawn}) > 1


def test_cells_tell_kinds_of_kernels_apart() -> None:
    def cell(source: str, language: str = "torch", **config: int) -> tuple[object, ...]:
        made = Node("x", source, language, (), Provenance(Origin.HAND))
        return behaviour_cell(made, NodeResult(Outcome.OK, log2_ratio=0.0, config=config))

    plain = "import torch\n\ndef run(a, b):\n    return torch.exp(a) + b\n"
    assert cell(plain) == cell(plain.replace("exp", "log"))
    assert cell(plain) != cell(plain.replace("torch.exp(a) + b", "a @ b"))
    assert cell(plain) != cell(
        plain.replace("    return", "    for _ in range(2):\n        a = a + 1\n    return")
    )
    assert cell(f"CHUNK = 16\n{plain}") != cell(f"CHUNK = 4096\n{plain}")
    assert cell(f"CHUNK = 16\n{plain}", CHUNK=4096) == cell(f"CHUNK = 4096\n{plain}"), (
        "the config that was found"
    )
    cuda = "__global__ void f(float* x) { for (int i = 0; i < 8; ++i) x[i] += 1; }"
    assert cell(cuda, "cuda") != cell(cuda.replace("x[i] += 1", "atomicAdd(&x[i], 1)"), "cuda")
    assert cell("not ( python", "torch")[0] == "torch", "a text that cannot be read still has a cell"
