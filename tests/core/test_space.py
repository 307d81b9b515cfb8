"""`Space`: a product of lists, thinned by constraints, never expanded before it is read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecast_autotune.errors import SettingsError
from forecast_autotune.records import Config
from forecast_autotune.space import Space

VALUES = st.lists(st.sampled_from([16, 32, 64, 128]), min_size=1, max_size=4, unique=True)


def test_launch_options_reach_the_config() -> None:
    (config,) = Space({"A": [1]}, num_warps=[2], num_stages=[5], num_ctas=[2], maxnreg=[128])
    assert config == Config.of({"A": 1}, num_warps=2, num_stages=5, num_ctas=2, maxnreg=128)
    assert list(Space({})) == [Config()]


def test_every_constraint_must_hold_and_sees_everything() -> None:
    seen: list[dict[str, Any]] = []

    def rule(p: dict[str, Any]) -> bool:
        seen.append(dict(p))
        return bool(p["BLOCK"] >= 16 * p["num_warps"])

    space = Space({"BLOCK": [64, 128]}, num_warps=[4, 8], where=[rule, lambda p: p["num_stages"] == 3])
    assert [str(c) for c in space] == [
        "BLOCK=64 warps=4 stages=3",
        "BLOCK=128 warps=4 stages=3",
        "BLOCK=128 warps=8 stages=3",
    ]
    assert set(seen[0]) == {"BLOCK", "num_warps", "num_stages", "num_ctas", "maxnreg"}


@given(
    a=VALUES, b=VALUES, warps=st.lists(st.sampled_from([1, 2, 4]), min_size=1, unique=True), cap=st.integers()
)
def test_it_is_the_filtered_product(a: list[int], b: list[int], warps: list[int], cap: int) -> None:
    space = Space({"A": a, "B": b}, num_warps=warps, where=[lambda p: p["A"] * p["B"] <= cap])
    results = list(space)
    expected = [(x, y, w) for x in a for y in b for w in warps if x * y <= cap]
    assert [(c.parameters()["A"], c.parameters()["B"], c.num_warps) for c in results] == expected
    assert len(set(results)) == len(results) <= space.upper_bound() == len(a) * len(b) * len(warps)


def test_nothing_is_expanded_before_it_is_read() -> None:
    requests: list[int] = []

    def rule(p: dict[str, Any]) -> bool:
        requests.append(p["A"])
        return True

    space = Space({"A": range(10**6), "B": range(10**6)}, where=[rule])
    assert space.upper_bound() == 10**12
    assert requests == []
    first = next(iter(space))
    assert first.parameters()["A"] == 0
    assert requests == [0]


def test_values_stay_as_the_user_wrote_them() -> None:
    marker = object()
    (given_values,) = Space({"F": [marker]}).assignments()
    assert given_values["F"] is marker


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kwargs": {"A": []}}, r"A needs a non-empty list of values, got \[\]"),
        ({"kwargs": {"A": 64}}, "A needs a non-empty list of values, got 64"),
        ({"kwargs": {"A": "64"}}, "A needs a non-empty list of values, got '64'"),
        ({"kwargs": {"A": {1, 2}}}, "A needs a non-empty list"),
        ({"kwargs": {}, "num_warps": 4}, "num_warps needs a non-empty list of values, got 4"),
        ({"kwargs": {"num_warps": [4]}}, "give num_warps as an argument of Space"),
        ({"kwargs": {"A": [1], "maxnreg": [4], "num_ctas": [1]}}, "give maxnreg, num_ctas as an argument"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Space(**arguments)


def test_a_misspelt_name_in_a_constraint_is_the_callers_to_see() -> None:
    with pytest.raises(KeyError, match="BLOK"):
        list(Space({"BLOCK": [1]}, where=[lambda p: p["BLOK"] > 0]))
