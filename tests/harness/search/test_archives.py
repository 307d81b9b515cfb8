"""Which nodes are expanded: PUCT against values worked out by hand, and greedy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from forecast_autotune.errors import SettingsError
from forecast_autotune.records import Outcome
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.records import Node, NodeResult
from forecast_harness.search.archive import ARCHIVES, open_archive, puct, puct_scores


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
) -> StubView:
    made = Provenance(Origin.HAND)
    nodes = {
        id: Node(id, f"# {id}", "torch", (parent,) if parent else (), made, batch=batch)
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
    found = puct_scores(stub_view(TREE, {"seed": 1, "a": 2}), c=2.0)
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
    found = puct_scores(stub_view(rows, {"a": 1}))
    # One node that is no seed: rewards have no range, so the bonus is all but nothing.
    assert found["a"] == pytest.approx(3.0, abs=1e-5)
    assert found["seed"] == pytest.approx(3.0, abs=1e-5), "expanded through its child: its best child counts"


def test_puct_takes_no_node_with_its_ancestor() -> None:
    view = stub_view(TREE)
    ranked = sorted(puct_scores(view).items(), key=lambda item: -item[1])
    assert [id for id, _ in ranked] == ["a", "aa", "b", "seed"]
    assert puct(view, 4) == ["a", "b"], "aa descends from a, and the seed is everyone's ancestor"
    assert puct(view, 1) == ["a"]


def test_a_late_descendant_is_blocked_by_its_ancestor() -> None:
    rows = [
        ("seed", "", 1.0, 0),
        ("x", "seed", None, 1),
        ("y", "seed", 1.2, 1),
        ("z", "y", 1.1, 2),
        ("zz", "z", 1.4, 3),
    ]
    # zz is best; z and y above it are blocked although z is between them and the seed.
    assert puct(stub_view(rows), 4) == ["zz"]


def test_puct_moves_on_when_a_node_is_expanded_often() -> None:
    rows = [("seed", "", 1.0, 0), ("a", "seed", 1.3, 1), ("b", "seed", 1.29, 1), ("aa", "a", 1.2, 2)]
    assert puct(stub_view(rows), 1) == ["a"]
    assert puct(stub_view(rows, {"a": 4}), 1) == ["b"]


def test_seeds_stay_when_the_archive_is_full() -> None:
    rows = [("seed", "", 1.0, 0), *((f"n{i}", "seed", 2.0 + i, 1) for i in range(5))]
    assert set(puct_scores(stub_view(rows), capacity=2)) == {"seed", "n4", "n3"}


@pytest.mark.parametrize("name", sorted(ARCHIVES))
def test_every_archive_obeys_the_protocol(name: str) -> None:
    archive = open_archive(name)
    rows = [
        ("seed", "", 1.0, 0),
        *((f"n{i}", "seed", 1.0 + i % 3, 1) for i in range(6)),
        ("bad", "seed", None, 1),
    ]
    view = stub_view(rows, spent=["n5"])
    for n in (1, 3, 20):
        picked = list(archive(view, n))
        assert picked == list(archive(stub_view(rows, spent=["n5"]), n)), "equal views, equal answers"
        assert len(set(picked)) == len(picked) <= n
        assert picked
        assert not {"bad", "n5"} & set(picked), "what did not run or is spent is not expanded"
    assert len(archive(view, 20)) == (5 if name == "puct" else 6)
    assert archive(stub_view([("seed", "", 1.0, 0)], spent=["seed"]), 2) == []


@pytest.mark.parametrize("name", ["greedy", "puct"])
def test_equal_nodes_are_taken_by_id(name: str) -> None:
    rows = [("seed", "", 1.0, 0), ("c", "seed", 2.0, 1), ("a", "seed", 2.0, 1), ("b", "seed", 2.0, 1)]
    view = stub_view(rows, {"seed": 1})
    assert open_archive(name)(view, 2) == ["a", "b"]


def test_an_unknown_archive_is_refused() -> None:
    with pytest.raises(SettingsError, match="one of puct, greedy, not 'best'"):
        open_archive("best")


def test_greedy_takes_the_fastest() -> None:
    assert open_archive("greedy")(stub_view(TREE, {"a": 9}), 2) == ["a", "aa"]
