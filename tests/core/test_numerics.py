"""numpy helpers of the hot path."""

from __future__ import annotations

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from forecast_autotune import numerics
from forecast_autotune.numerics import fast_median, fast_unique, single_threaded_blas
from forecast_autotune.surrogates.covariance import SmoothCovariance


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (7, 4), (8, 5)])
@pytest.mark.parametrize("axis", [0, 1])
def test_the_median_is_numpys(shape: tuple[int, int], axis: int) -> None:
    values = np.random.default_rng(0).standard_normal(shape)
    np.testing.assert_array_equal(fast_median(values, axis), np.median(values, axis=axis))


@pytest.mark.parametrize("values", [[], [3], [2, 2], [5, 1, 5, 0, 1, -4]])
def test_distinct_numbers_are_numpys(values: list[int]) -> None:
    given = np.array(values, np.intp)
    np.testing.assert_array_equal(fast_unique(given), np.unique(given))


def test_one_thread_inside_and_as_before_outside() -> None:
    def blas() -> set[int]:
        return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}

    numerics._controller.cache_clear()  # other tests of this process may have loaded another BLAS since
    with threadpool_limits(2, user_api="blas"):
        some = blas()  # a machine with one core allows no more
        with single_threaded_blas():
            assert blas() <= {1}
        assert blas() == some


def test_halves_of_a_grid_give_what_every_pair_gives() -> None:
    """Thousands of rows on a grid take a shorter way than a few rows do."""
    axes = np.meshgrid(*([np.arange(5.0)] * 3), np.arange(0.0, 2.8, 0.7), indexing="ij")
    a = np.stack([x.ravel() for x in axes], axis=1)
    b = a[::7]
    covariance = SmoothCovariance(0.3, 0.2, 0.1, 1.5, 2.0)
    whole = covariance(a, b)
    single = np.concatenate([covariance(row[None, :], b) for row in a])
    np.testing.assert_allclose(whole, single, rtol=1e-12)
    assert whole[7, 1] == pytest.approx(0.6), "a point and itself: all three parts"
    assert whole[8, 1] < 0.5, "what is rough is not shared with a neighbour"
    off = a + np.random.default_rng(0).standard_normal(a.shape)
    np.testing.assert_allclose(covariance(off, b)[:3], covariance(off[:3], b), rtol=1e-12)
