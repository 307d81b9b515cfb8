"""The plug-in points of a search. Whoever implements one sees no log, no clock and no other plug-in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from forecast_harness.records import (
    ConfirmationJob,
    FullVerification,
    Node,
    NodeJob,
    NodeResult,
    VerificationJob,
)
from forecast_harness.search.history.events import Forecasted, NodeForecastRequest


@runtime_checkable
class ArchiveView(Protocol):
    """What an archive may see of a state: nodes judged in the batches that it may know of."""

    @property
    def nodes(self) -> Mapping[str, Node]:
        """All nodes by id, in the order in which they were accepted."""
        ...

    @property
    def seeds(self) -> Sequence[str]:
        """Ids of the seeds."""
        ...

    @property
    def scores(self) -> Mapping[str, float]:
        """log2(time / time of the first seed) of every node that ran; negative is faster."""
        ...

    @property
    def judged(self) -> Mapping[str, NodeResult]:
        """Every judged node."""
        ...

    @property
    def expansions(self) -> Mapping[str, int]:
        """How often each node was expanded in the batches before, by id."""
        ...

    @property
    def exhausted_parents(self) -> frozenset[str]:
        """Nodes for which no proposer has anything more."""
        ...


class Archive(Protocol):
    """Which nodes to expand next. A pure function: equal views and seeds give equal answers."""

    name: str

    def select(self, view: ArchiveView, n: int, seed: int) -> Sequence[str]:
        """Up to `n` ids of nodes that ran and are not in `spent_parents`; all, where there are fewer."""
        ...


class Forecaster(Protocol):
    """Forecasts nodes without running them."""

    name: str
    """With its version: part of the context."""

    def forecast(self, question: NodeForecastRequest) -> Forecasted:
        """Beliefs about `question.nodes` relative to `question.reference`. Failures are told, not raised."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


class JudgePool(Protocol):
    """Judges at work: one per device, here or on other machines."""

    def submit(self, job: NodeJob) -> Future[NodeResult]:
        """Run it on the next free lane, at most once per `job.id`. The future raises `LaneFailure`."""
        ...

    def verify(self, job: VerificationJob) -> Future[FullVerification]:
        """Like `submit`, and before all jobs that wait."""
        ...

    def confirm(self, confirm: ConfirmationJob) -> Future[Mapping[str, NodeResult]]:
        """Like `submit`, for finalists."""
        ...

    def give_up(self) -> None:
        """End what waits and what is under way: nobody asks for it any more."""
        ...

    @property
    def capacity(self) -> int:
        """How many jobs run at once just now; changes as lanes join and leave."""
        ...

    def close(self) -> None:
        """End all lanes."""
        ...
