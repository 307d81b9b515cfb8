"""A range of sizes as a user gives it: its key, the sizes that stand for it, and their weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forecast_autotune import Robust
from forecast_autotune.errors import SettingsError
from forecast_autotune.ranges.robust import spread_points


def test_values_inside_share_a_key_and_others_keep_theirs() -> None:
    robust = Robust("M", (1, 8192))
    assert {robust("M", v) for v in (1, 37, 8192)} == {"1..8192"}
    assert robust("M", 8193) == 8193
    assert robust("N", 37) == 37
    assert robust("M", True) is True
    assert robust("M", 37.0) == 37.0
    stepped = Robust("M", range(16, 65, 16))
    assert [stepped("M", v) for v in (16, 17, 64)] == ["16..64:16", 17, "16..64:16"]


def test_four_sizes_are_measured_and_sixteen_judged_on_a_log_scale() -> None:
    robust = Robust("M", (1, 8192))
    assert robust.measured == (1, 16, 512, 8192)
    assert robust.points() == tuple(2**i for i in range(14))
    assert Robust("M", (100, 1000), at=[200]).points()[:3] == (100, 128, 200)
    assert spread_points(range(7, 8), 4) == (7,)
    assert all(p in range(48, 4096, 48) for p in spread_points(range(48, 4096, 48), 16))


@pytest.mark.parametrize(
    ("weigh", "heavier"), [("uniform", 4096), (lambda size: 1.0 if size <= 16 else 0.0, 16)]
)
def test_weights_follow_how_often_sizes_are_met(weigh: Any, heavier: int) -> None:
    robust = Robust("M", (1, 4096), at=[1, 16, 256, 4096], weigh=weigh)
    weights = robust.weights()
    assert weights.sum() == pytest.approx(1.0)
    assert robust.points()[int(weights.argmax())] == heavier or weigh == "uniform"
    assert weights[robust.points().index(heavier)] > weights[0] * 4


def test_by_default_every_power_of_two_counts_alike() -> None:
    weights = Robust("M", (1, 8192)).weights()
    assert weights == pytest.approx(np.full(14, 1 / 14))


def test_sizes_between_two_measured_ones_are_spoken_for_by_both() -> None:
    robust = Robust("M", (1, 1024), at=[4, 64])
    shares = dict(zip(robust.points(), robust.shares().tolist(), strict=True))
    assert shares[1] == [1.0, 0.0]
    assert shares[4] == [1.0, 0.0]
    assert shares[16] == pytest.approx([0.5, 0.5])
    assert shares[1024] == [0.0, 1.0]


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
