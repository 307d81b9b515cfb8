"""What the tuner asks of whatever holds the clock."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from forecast_autotune.records import Candidate, Measurement, MeasuringCost


class Measurer(Protocol):
    """Compiles and times candidates of one problem. Knows no model and no store."""

    workers: int
    """How many candidates it can compile at once."""

    def ready(self) -> Collection[Candidate]:
        """Candidates that an earlier decision has compiled."""
        ...

    def prefetch(self, candidates: Sequence[Candidate]) -> None:
        """Start compiling these on idle workers, best first, without waiting for them.

        They will probably be asked for, but need not be. A measurer whose compilations would disturb
        the caller does nothing.
        """
        ...

    def measure(
        self, candidates: Sequence[Candidate], *, prefetch: Sequence[Candidate] = ()
    ) -> Iterator[Measurement]:
        """Yield one measurement per candidate, each as soon as it exists, in any order.

        `prefetch` may be compiled on idle workers, but is not timed. A candidate that fails yields
        a measurement with its outcome; only a broken harness raises.
        """
        ...

    def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        """Time these candidates again, interleaved, at full fidelity; in the order given."""
        ...

    def spent(self) -> MeasuringCost:
        """What has been used so far."""
        ...

    def close(self) -> None:
        """Cancel compilations nobody waits for, and free what is held."""
        ...
