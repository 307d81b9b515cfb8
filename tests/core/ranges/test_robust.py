"""A range of sizes as a user gives it: its key, the sizes that stand for it, and their weights."""

from __future__ import annotations

from typing import Any

import pytest

from forecast_autotune import Robust
from forecast_autotune.errors import SettingsError


def test_values_inside_share_a_key_and_others_keep_theirs() -> None:
    robust = Robust("M", (1, 8192))
    assert {robust("M", v) for v in (1, 37, 8192)} == {"1..8192"}
    assert robust("M", 8193) == 8193
    assert robust("N", 37) == 37
    assert robust("M", True) is True
    assert robust("M", 37.0) == 37.0
    stepped = Robust("M", range(16, 65, 16))
    assert [stepped("M", v) for v in (16, 17, 64)] == ["16..64:16", 17, "16..64:16"]


@pytest.mark.parametrize(
    ("weigh", "heavier"), [("uniform", 4096), (lambda size: 1.0 if size <= 16 else 0.0, 16)]
)
def test_weights_follow_how_often_sizes_are_met(weigh: Any, heavier: int) -> None:
    robust = Robust("M", (1, 4096), at=[1, 16, 256, 4096], weigh=weigh)
    weights = robust.weights()
    assert weights.sum() == pytest.approx(1.0)
    assert robust.points()[int(weights.argmax())] == heavier or weigh == "uniform"
    assert weights[robust.points().index(heavier)] > weights[0] * 4


def test_a_decision_on_a_range_is_known_by_all_that_it_depends_on() -> None:
    given: list[Any] = [
        Robust("M", (1, 64)),
        Robust("M", (1, 128)),
        Robust("N", (1, 64)),
        Robust("M", (1, 64), at=[8]),
        Robust("M", (1, 64), weigh="uniform"),
        Robust("M", (1, 64), worst=True),
    ]
    assert len({repr(r.identity()) for r in given}) == len(given)
    assert Robust("M", range(1, 65)).identity() == given[0].identity()


@pytest.mark.parametrize(
    ("args", "options"),
    [
        (("M", (0, 8)), {}),
        (("M", (8, 1)), {}),
        (("M", 8), {}),
        (("M", (1.0, 8)), {}),
        (("", (1, 8)), {}),
        (("M", (1, 8)), {"at": []}),
        (("M", (1, 8)), {"at": [9]}),
        (("M", (1, 8)), {"at": [2.0]}),
        (("M", (1, 8)), {"weigh": "often"}),
    ],
)
def test_what_is_no_range_is_refused_where_it_is_written(args: Any, options: Any) -> None:
    with pytest.raises(SettingsError):
        Robust(*args, **options)


def test_weights_that_are_none_are_refused() -> None:
    with pytest.raises(SettingsError, match="weigh must give"):
        Robust("M", (1, 8), weigh=lambda size: -1.0).weights()
