"""What numpy does too slowly where a first forecast is waited for."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt


def one_thread() -> AbstractContextManager[object]:
    """A `with` block in which BLAS keeps to one thread.

    The matrices of a decision have a few hundred rows: one thread takes some milliseconds. BLAS threads
    wait for each other by spinning, and where compilers had the cores, several took hundreds.
    """
    limited: AbstractContextManager[object] = _controller().limit(limits=1, user_api="blas")
    return limited


@cache
def _controller() -> Any:
    """Looks up the process's BLAS libraries once: 4 ms, and 15 us for each limit after that.

    One that is loaded later, as scipy's is, is not found; decisions use numpy's, which is there by then.
    """
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def median(values: npt.NDArray[np.float64], axis: int) -> npt.NDArray[np.float64]:
    """`numpy.median` of values without NaN; numpy's own imports masked arrays to look for them (15 ms)."""
    n = values.shape[axis]
    low, high = (n - 1) // 2, n // 2
    ordered = np.partition(values, (low, high), axis=axis)
    return np.asarray((ordered.take(low, axis=axis) + ordered.take(high, axis=axis)) / 2)
