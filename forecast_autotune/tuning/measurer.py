"""The interface between the tuner and the clock."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from forecast_autotune.records import Candidate, Measurement, MeasuringCost


class Measurer(Protocol):
    """Compiles and times candidates of one problem. Knows no model and no store.

    The defaults here compile nothing ahead, hold nothing, and compare nothing.
    """

    @property
    def workers(self) -> int:
        """How many candidates it can compile at once."""
        ...

    @property
    def quiet(self) -> bool:
        """Whether candidates can be timed while others compile."""
        return False

    def ready(self) -> Collection[Candidate]:
        """Candidates that are compiled, in this decision or an earlier one, and not timed in this one."""
        return ()

    def compiling(self) -> Mapping[Candidate, float]:
        """Candidates that compile now, with their seconds so far."""
        return {}

    def prefetch(self, candidates: Sequence[Candidate]) -> None:
        """Start compiling these on idle workers, best first, without waiting for them.

        A later `measure` will probably ask for them. A measurer whose compilations would disturb the caller does
        nothing.
        """
        return

    def measure(
        self,
        candidates: Sequence[Candidate],
        *,
        prefetch: Sequence[Candidate] = (),
        within_s: float | None = None,
    ) -> Iterator[Measurement]:
        """Yield one measurement per candidate, each as soon as it exists; of those that exist, in this order.

        All are compiled in this order, then those of `prefetch`, which are not timed, in place of whatever
        was queued before. A compilation that is not among them is given up if one of them needs its worker.
        The caller may stop listening at any time: compilations go on. With `within_s`, so does the iterator
        when no measurement has come for so many seconds. A candidate that fails yields a measurement with
        its outcome; only a broken harness raises.
        """
        ...

    def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        """Time these candidates again, interleaved, at full fidelity; in the order given.

        The first that ties with the fastest (`NEGLIGIBLE_GAIN`) will be chosen; in exhaustive mode, the fastest.
        """
        return []

    def spent(self) -> MeasuringCost:
        """Return the seconds and compilations used so far."""
        ...

    def close(self) -> None:
        """Cancel compilations nobody waits for, and free all resources."""
        return


class MeasurerFailedError(Exception):
    """A measurer's exception, wrapped: it must not pass for a fault of the tuner."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def measurer_errors() -> Iterator[None]:
    """Raise every exception of the block as a `MeasurerFailedError`."""
    try:
        yield
    except Exception as error:
        raise MeasurerFailedError(error) from error
