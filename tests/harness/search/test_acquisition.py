"""Choosing from beliefs: the formula, the slots, and propensities that are what they say."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from forecast_autotune.records import Outcome
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.records import Node, NodeForecast, NodeResult
from forecast_harness.search import plan
from forecast_harness.search.acquisition import choose_by_forecast, choose_first
from forecast_harness.search.plan import ARCHIVES, allocate, open_archive, puct, puct_scores


def belief(mean: float, sd: float = 0.05, p_fail: float = 0.0, abstains: bool = False) -> NodeForecast:
    better = 0.5 * math.erfc(mean / sd / math.sqrt(2)) if sd else float(mean < 0)
    return NodeForecast(mean, sd, p_fail, (1 - p_fail) * better, abstains)


beliefs = st.lists(
    st.builds(belief, st.floats(-1, 1), st.floats(0.01, 1), st.floats(0, 1), st.booleans()), max_size=12
)


def test_the_best_and_the_uncertain_are_chosen() -> None:
    known = {
        "good": belief(-0.3),
        "better": belief(-0.5),
        "fine": belief(-0.2),
        "bad": belief(0.5),
        "worse": belief(0.6),
        "fails": belief(-0.5, p_fail=0.99),
        "unsure": belief(0.05, 0.3),
        "silent": belief(-1.0, abstains=True),
    }
    found = choose_by_forecast(3, list(known), known, slots=5, audit=0.0, seed=0, worth=0.01)
    assert found.nodes == ("better", "good", "fine", "silent", "unsure")
    assert found.reasons == ("top", "top", "top", "uncertain", "top")
    assert found.propensities == (1.0,) * 5


def test_the_hopeless_get_no_slot_but_an_audit() -> None:
    known = {f"n{i}": belief(1.0) for i in range(10)}
    chosen = [
        choose_by_forecast(b, list(known), known, slots=4, audit=0.25, seed=0, worth=1e-3) for b in range(20)
    ]
    assert all(c.reasons == ("audit",) and c.propensities == (0.1,) for c in chosen)
    assert len({c.nodes for c in chosen}) > 5


@hypothesis_settings(max_examples=200)
@given(beliefs, st.integers(0, 15), st.floats(0, 1), st.integers())
def test_a_choice_is_within_its_slots_and_its_propensities_are_probabilities(
    given_beliefs: list[NodeForecast], slots: int, audit: float, seed: int
) -> None:
    known = {f"n{i}": b for i, b in enumerate(given_beliefs)}
    found = choose_by_forecast(0, list(known), known, slots=slots, audit=audit, seed=seed)
    assert len(found.nodes) == len(set(found.nodes)) == len(found.reasons) == len(found.propensities) <= slots
    assert set(found.nodes) <= set(known)
    assert all(0.0 < p <= 1.0 for p in found.propensities)
    assert set(found.reasons) <= {"top", "uncertain", "audit"}
    assert found == choose_by_forecast(0, list(known), known, slots=slots, audit=audit, seed=seed)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("slots", [1, 2, 5, 8, 12])
@pytest.mark.parametrize("audit", [0.1, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("worth", [0.0, 0.02])
def test_propensities_are_the_frequencies_of_being_measured(slots: int, audit: float, worth: float) -> None:
    chance = random.Random(5)
    known = {f"n{i:02}": belief(chance.gauss(0.2, 0.3), 0.1, abstains=i % 7 == 3) for i in range(15)}
    runs = 4000
    counted: Counter[str] = Counter()
    stated: dict[str, float] = {}
    sizes = 0
    for number in range(runs):
        found = choose_by_forecast(number, list(known), known, slots=slots, audit=audit, seed=1, worth=worth)
        counted.update(found.nodes)
        sizes += len(found.nodes)
        for node, odds in zip(found.nodes, found.propensities, strict=True):
            assert stated.setdefault(node, odds) == odds
    for node, odds in stated.items():
        # 4.5 standard errors: 24 cases of 15 nodes pass together with 99.8 %.
        assert abs(counted[node] / runs - odds) <= 4.5 * math.sqrt(odds * (1 - odds) / runs) + 1e-12
    assert sum(stated.values()) == pytest.approx(sizes / runs, abs=0.05)


def test_without_forecasts_the_first_of_each_parent_are_measured() -> None:
    found = choose_first(2, [["a1", "a2", "a3"], ["b1"], ["c1", "c2"]], k=2, slots=4)
    assert found.nodes == ("a1", "a2", "b1", "c1")
    assert set(found.reasons) == {"unforecast"}
    assert set(found.propensities) == {1.0}
    assert choose_first(2, [["a"]], k=2, slots=0).nodes == ()


def test_every_arm_is_asked_for_as_much() -> None:
    arms = ["m/one", "m/two", "m/three"]
    counts = [allocate(arms, 16, seed) for seed in range(20)]
    assert all(sum(c.values()) == 16 and set(c.values()) == {5, 6} for c in counts)
    assert {a for c in counts for a, n in c.items() if n == 6} == set(arms)
    assert allocate(arms, 1, 0) in [{a: 1} for a in arms]
    assert allocate([], 16, 0) == {}


# --- which nodes are expanded ---


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
    found = puct_scores(stub_view(TREE, {"seed": 1, "a": 2}))
    bonus = 0.5 * math.sqrt(1 + 3)
    # Ranks: a (2.0), aa (1.8), b (1.5), seed (1.0); shares 4, 3, 2, 1 of 10. Visits: the seed 1 + 2, a 2.
    assert found == pytest.approx(
        {
            "seed": 2.0 + bonus * 0.1 / (1 + 3),
            "a": 1.8 + bonus * 0.4 / (1 + 2),
            "b": 1.5 + bonus * 0.2,
            "aa": 1.8 + bonus * 0.3,
        }
    )


def test_puct_takes_no_node_with_its_ancestor() -> None:
    view = stub_view(TREE)
    ranked = sorted(puct_scores(view).items(), key=lambda item: -item[1])
    assert [id for id, _ in ranked] == ["a", "aa", "b", "seed"]
    assert puct(view, 4) == ["a", "b"], "aa descends from a, and the seed is everyone's ancestor"
    assert puct(view, 1) == ["a"]


def test_puct_moves_on_when_a_node_is_expanded_often() -> None:
    rows = [("seed", "", 1.0, 0), ("a", "seed", 1.3, 1), ("b", "seed", 1.29, 1), ("aa", "a", 1.2, 2)]
    assert puct(stub_view(rows), 1) == ["a"]
    assert puct(stub_view(rows, {"a": 4}), 1) == ["b"]


def test_seeds_stay_when_the_archive_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_CAPACITY", 2)
    rows = [("seed", "", 1.0, 0), *((f"n{i}", "seed", 2.0 + i, 1) for i in range(5))]
    assert set(puct_scores(stub_view(rows))) == {"seed", "n4", "n3"}


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
