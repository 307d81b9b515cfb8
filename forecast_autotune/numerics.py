"""Numbers that several rooms share, and what numpy does too slowly where a first forecast is waited for."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

INTERVAL_LEVELS = (0.5, 0.8, 0.9, 0.95)
"""Levels of central intervals that are calibrated; between them the factors are interpolated."""
DENSE = 100
"""Beyond this many candidates a list is a denser grid over the same ground."""


def single_threaded_blas() -> AbstractContextManager[object]:
    """A `with` block in which BLAS keeps to one thread.

    The matrices of a decision have a few hundred rows: one thread takes some milliseconds. BLAS threads
    wait for each other by spinning, and where compilers had the cores, several took hundreds.
    """
    limiter: AbstractContextManager[object] = _controller().limit(limits=1, user_api="blas")
    return limiter


@cache
def _controller() -> Any:
    """Looks up the process's BLAS libraries once: 4 ms, and 15 us for each limit after that.

    One that is loaded later, as scipy's is, is not found; decisions use numpy's, which is there by then.
    """
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def fast_median(values: npt.NDArray[np.float64], axis: int) -> npt.NDArray[np.float64]:
    """`numpy.median` of values without NaN; numpy's own imports masked arrays to look for them (15 ms)."""
    n = values.shape[axis]
    low, high = (n - 1) // 2, n // 2
    partition = np.partition(values, (low, high), axis=axis)
    return np.asarray((partition.take(low, axis=axis) + partition.take(high, axis=axis)) / 2)


def fast_unique(values: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """`numpy.unique` of whole numbers, [n]; numpy's own imports masked arrays to look for them (15 ms)."""
    ascending = np.sort(values)
    return ascending[np.concatenate(([True], ascending[1:] != ascending[:-1]))[: len(ascending)]]


def sparse_count(candidates: float, dense: float = DENSE) -> float:
    """The number of candidates that count of a list this long: beyond `dense`, the fourth root of the rest.

    A denser grid over the same ground holds more near-copies, not more secrets.
    """
    return min(candidates, dense * math.sqrt(math.sqrt(max(1.0, candidates / dense))))
