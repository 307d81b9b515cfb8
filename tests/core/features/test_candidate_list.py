"""Candidates as columns, assignments and units: the same as looking at them one by one."""

from __future__ import annotations

import itertools
from typing import Any

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.records import Candidate, Config

REGULAR = [
    Candidate(Config.of({"A": a, "MODE": m}, num_warps=w, maxnreg=r))
    for a, m, w, r in itertools.product((16, 64), ("x", "y"), (4, 8), (None, 32))
]


def test_units_share_everything_but_warps_and_stages() -> None:
    listed = CandidateList.of(REGULAR)
    grids = {c: (1 if c.config.num_warps == 4 else 2,) for c in REGULAR if dict(c.config.kwargs)["A"] == 16}
    units = listed.units(grids, (9,))
    by_unit: dict[int, set[tuple[Any, ...]]] = {}
    for c, unit, grid in zip(REGULAR, units.of, units.grids, strict=True):
        by_unit.setdefault(int(unit), set()).add((c.config.kwargs, c.config.maxnreg, grid))
    assert all(len(seen) == 1 for seen in by_unit.values())
    assert len(by_unit) == len(set.union(*by_unit.values())) == len(units.first) == 12
    assert units.sizes.tolist() == [1.0, 1.0] * 4 + [2.0] * 4
    assert units.of[units.first].tolist() == list(range(12))
    assert listed.units(grids, (9,)) is units
    assert listed.units({}, None).grids == [None] * len(REGULAR)
