"""numpy helpers of the hot path."""

from __future__ import annotations

from threadpoolctl import threadpool_info, threadpool_limits

from forecast_autotune import numerics
from forecast_autotune.numerics import single_threaded_blas


def test_one_thread_inside_and_as_before_outside() -> None:
    def blas() -> set[int]:
        return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}

    numerics._controller.cache_clear()  # other tests of this process may have loaded another BLAS since
    with threadpool_limits(2, user_api="blas"):
        some = blas()  # a machine with one core allows no more
        with single_threaded_blas():
            assert blas() <= {1}
        assert blas() == some
