"""Candidates as columns, assignments and units: the same as looking at them one by one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from forecast_autotune.features.candidate_list import CandidateList, Column, group_rows
from forecast_autotune.features.config_encoder import ConfigEncoder
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.records import Candidate, Config

REGULAR = [
    Candidate(Config.of({"A": a, "MODE": m}, num_warps=w, maxnreg=r))
    for a, m, w, r in itertools.product((16, 64), ("x", "y"), (4, 8), (None, 32))
]
_GIVEN: list[tuple[dict[str, object], int, str]] = [
    ({"A": 1}, 4, "base"),
    ({"A": True}, 8, "base"),
    ({"A": None}, 4, "base"),
    ({}, 4, "base"),
    ({"B": "1", "A": 1}, 2, "base"),
    ({"A": 1}, 4, "other"),
    ({"maxnreg": 7}, 4, "base"),
]
RAGGED = [Candidate(Config.of(kwargs, num_warps=w), variant) for kwargs, w, variant in _GIVEN]


def parameters(candidate: Candidate) -> dict[str, Any]:
    return {**candidate.config.parameters(), "variant": candidate.variant}


@pytest.mark.parametrize("candidates", [REGULAR, RAGGED, RAGGED[:1], []])
def test_columns_say_what_each_candidate_says(candidates: list[Candidate]) -> None:
    columns = CandidateList.of(candidates).columns
    for i, candidate in enumerate(candidates):
        results = {name: column.values[column.codes[i]] for name, column in columns.items()}
        given = {name: value for name, value in results.items() if value is not None}
        expected = {name: value for name, value in parameters(candidate).items() if value is not None}
        assert repr(sorted(given.items())) == repr(sorted(expected.items())), "1 and True are different"


@pytest.mark.parametrize(
    "candidates", [REGULAR, RAGGED, [Candidate(Config(num_warps=w)) for w in (1, 2)], []]
)
def test_assignments_are_named_once_each_in_order(candidates: list[Candidate]) -> None:
    names, keys = CandidateList.of(candidates).assignments
    expected = [assignment_of(c) for c in candidates]
    assert [names[k] for k in keys] == expected
    assert list(names) == list(dict.fromkeys(expected))


def test_among_finds_every_copy() -> None:
    once = CandidateList.of(REGULAR).mask_of({REGULAR[3], RAGGED[0]})
    assert np.flatnonzero(once).tolist() == [3]
    twice = CandidateList.of([*REGULAR, REGULAR[3]]).mask_of({REGULAR[3]})
    assert np.flatnonzero(twice).tolist() == [3, len(REGULAR)]


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


def test_groups_of_very_many_columns_do_not_overflow() -> None:
    n = 50
    columns = [Column.of([(i * (k + 1)) % 23 for i in range(n)]) for k in range(40)]
    first, codes = group_rows(columns, n)
    rows = list(zip(*(column.codes.tolist() for column in columns), strict=True))
    expected = list(dict.fromkeys(rows))
    assert [expected.index(row) for row in rows] == codes.tolist()
    assert [rows[i] for i in first] == expected


def test_coordinates_are_those_of_each_value() -> None:
    """One doubling of a block is one unit, words are 1.5 apart, a missing value sits at the origin."""
    candidates = [*REGULAR, Candidate(Config.of({"A": 16}))]
    encoder = ConfigEncoder.of(candidates)
    points = encoder(candidates)
    assert dict(encoder.words)["MODE"] == ("'x'", "'y'", "None")
    blocks = points[:, [name for name, _ in encoder.numeric].index("A")]
    assert blocks.tolist() == [np.log2(float(dict(c.config.kwargs)["A"] or 0)) for c in candidates]
    one, other = (Candidate(Config.of({"A": 16, "MODE": mode})) for mode in "xy")
    apart = encoder([one]) - encoder([other])
    assert float(np.sqrt((apart**2).sum())) == pytest.approx(1.5)
    unknown = encoder([Candidate(Config.of({"A": 16, "MODE": "z"}))])
    assert np.count_nonzero(unknown[0, len(encoder.numeric) : len(encoder.numeric) + 3]) == 0
    assert encoder([]).shape == (0, encoder.width)
