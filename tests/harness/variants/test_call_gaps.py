"""Memory between the elements of a drawn tensor."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from forecast_autotune.records import Argument
from forecast_harness.trials.variants.base_runner import gap_mask
from forecast_harness.trials.variants.call_sampling import _has_gaps

DIMENSIONS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=3)


@given(DIMENSIONS)
def test_no_gap_is_overlooked(dimensions: list[tuple[int, int]]) -> None:
    shape, stride = zip(*dimensions, strict=True)
    tensor = Argument("x", "tensor", "float32", shape, stride, True)
    distinct = {0}
    for n, step in dimensions:
        distinct = {at + i * step for at in distinct for i in range(n)}
    if len(distinct) < len(gap_mask(tensor)) and len(distinct) == math.prod(shape):
        assert _has_gaps(tensor)  # of a tensor whose elements do not overlap


def test_a_tensor_without_gaps_is_known_as_such() -> None:
    assert not _has_gaps(Argument("x", "tensor", "float32", (3, 4), (4, 1), True))
    assert not _has_gaps(Argument("x", "tensor", "float32", (3, 1, 4), (4, 0, 1), True))
    assert _has_gaps(Argument("x", "tensor", "float32", (3, 4), (5, 1), True))
