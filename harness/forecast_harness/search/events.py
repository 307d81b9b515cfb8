"""Events of a log: one per line, in the order in which things came to be known.

Actions and events that belong together share a key, made of what was asked and nothing else, so an action
that is done twice is recognised: `ProposalRequest.id`, the batch number, or `NodeJob.id`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from forecast_autotune.errors import RecordError
from forecast_autotune.records import codec
from forecast_harness.records import (
    ConfirmationJob,
    FullVerification,
    Node,
    NodeForecast,
    NodeJob,
    NodeResult,
    ProposalRequest,
    Proposed,
    SearchContext,
    SearchCost,
    SearchTarget,
    VerificationJob,
)


@dataclass(frozen=True)
class Started:
    """The first line of a log."""

    context: SearchContext
    target: SearchTarget
    seeds: tuple[Node, ...]
    at: str


@dataclass(frozen=True)
class Resumed:
    """The log was opened again; everything before it stands."""

    at: str


@dataclass(frozen=True)
class Forecasted:
    """The forecasts of a batch's new nodes (and of those deferred before, against the newer reference)."""

    batch: int
    reference: str
    """Id of the node that beliefs are relative to: the incumbent when the batch was decided."""
    beliefs: Mapping[str, NodeForecast]
    spent: SearchCost = SearchCost()
    problem: str = ""
    """Why there are none; the batch is then chosen without."""


@dataclass(frozen=True)
class Chosen:
    """The nodes that a batch measures, and why: written down for readers, derivable from the events before it."""

    batch: int
    nodes: tuple[str, ...]
    reasons: tuple[str, ...]
    """One of `top`, `uncertain`, `audit`, `unforecast` per node."""
    propensities: tuple[float, ...]
    """The probability with which each was chosen, given the forecasts; 1 without a draw."""


@dataclass(frozen=True)
class Finished:
    """A job ended: its node was judged."""

    job: str
    node: str
    batch: int
    judged: NodeResult


@dataclass(frozen=True)
class Lost:
    """A job's lane failed; the node is not to blame. The job is tried again, a limited number of times."""

    job: str
    node: str
    batch: int
    reason: str
    lane: str = ""
    verification: bool = False
    """Whether the job was the full verification of a node that is judged already."""
    final: bool = False
    """Whether it is not tried again: a confirmation that there is no more time for."""


@dataclass(frozen=True)
class Verified:
    """A node that ran was verified in full: it may lead from here on, or its outcome is this one."""

    job: str
    node: str
    found: FullVerification


@dataclass(frozen=True)
class Confirmed:
    """The finalists timed again in a fresh process with fresh seeds, all against the first seed."""

    judged: Mapping[str, NodeResult]


@dataclass(frozen=True)
class Expired:
    """The wall-clock limit is near: nothing new is begun, the best is confirmed. The runner records it, since
    no decision looks at a clock."""

    seconds: float
    """Seconds that the search has run, earlier sessions included."""
    at: str = ""


@dataclass(frozen=True)
class Stopped:
    """The search is over (`interrupted` ones may be resumed)."""

    reason: str
    interrupted: bool = False
    at: str = ""


Event: TypeAlias = (
    Started
    | Resumed
    | Proposed
    | Forecasted
    | Chosen
    | Finished
    | Lost
    | Verified
    | Confirmed
    | Expired
    | Stopped
)
EVENT_TYPES: Mapping[str, type[Any]] = {kind.__name__.lower(): kind for kind in get_args(Event)}


def to_json(event: Event) -> dict[str, Any]:
    """One JSON object; `type` is the class's name in lower case."""
    return {"type": type(event).__name__.lower(), **codec.to_json(event)}


def from_json(data: Any) -> Event:
    """Read what `to_json` wrote. Raises `RecordError`."""
    kind = EVENT_TYPES.get(str(data.get("type"))) if isinstance(data, dict) else None
    if kind is None:
        raise RecordError(f"an event needs a type of {', '.join(EVENT_TYPES)}, got {data!r:.80}")
    event: Event = codec.from_json(kind, data)
    return event


@dataclass(frozen=True)
class NodeForecastRequest:
    """Asks the forecaster about a batch."""

    batch: int
    reference: Node
    nodes: tuple[Node, ...]
    judged: tuple[tuple[Node, NodeResult, float], ...]
    """Everything measured that this batch may know: node, result, score as in `ProposalRequest.score`."""
    target: SearchTarget | None = None

    def nodes_by_id(self) -> dict[str, Node]:
        """The judged nodes, the batch, and the reference."""
        nodes = (*(n for n, _, _ in self.judged), *self.nodes, self.reference)
        return {n.id: n for n in nodes}


@dataclass(frozen=True)
class RecordChoice:
    """Nothing to wait for: `Chosen` is to be written down."""

    event: Chosen


@dataclass(frozen=True)
class StopSearch:
    """Nothing is left to do."""

    reason: str


Action: TypeAlias = (
    ProposalRequest
    | NodeForecastRequest
    | RecordChoice
    | NodeJob
    | VerificationJob
    | ConfirmationJob
    | StopSearch
)
