"""Balanced sampling: even over bins and groups, and nothing twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecast_train.llm.data.sampling import balanced_rows, even_counts


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(0, 200))
def test_water_is_level(available: list[int], target: int) -> None:
    taken = even_counts(available, target)
    assert sum(taken) == min(target, sum(available))
    assert all(t <= have for t, have in zip(taken, available, strict=True))
    # Whoever gives less than another, by more than the indivisible rest, has given all it has.
    most = max(taken, default=0)
    assert all(t == have or t >= most - 1 for t, have in zip(taken, available, strict=True))


def test_counts_cannot_be_negative() -> None:
    with pytest.raises(ValueError, match="negative"):
        even_counts([3], -1)


@given(st.integers(0, 2**31), st.integers(1, 20))
def test_rare_bins_and_small_groups_are_not_drowned(seed: int, per_bin: int) -> None:
    generator = np.random.default_rng(seed)
    # One group has a hundred rows of bin 0, the others three; bin 2 is rare everywhere.
    bins = [np.array([0] * 100 + [1] * 5), np.array([0, 0, 0, 1]), np.array([0, 1, 2])]
    kept = balanced_rows(bins, per_bin, 4, generator)
    for group, rows in zip(bins, kept, strict=True):
        assert len(set(rows.tolist())) == len(rows)
        assert set(rows.tolist()) <= set(range(len(group)))
    chosen = [group[rows] for group, rows in zip(bins, kept, strict=True)]
    joined = np.concatenate(chosen)
    assert [(joined == b).sum() for b in range(4)] == [min(per_bin, have) for have in (104, 7, 1, 0)]
    zeros = [(group == 0).sum() for group in chosen]
    assert zeros[1] >= min(3, per_bin // 3)
