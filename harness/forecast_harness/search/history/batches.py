"""What a state is made of: batches, what their arms gave, and the points of the progress curve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from forecast_harness.records import Node, NodeResult, Proposed, SearchCost
from forecast_harness.search.history.events import Chosen, Forecasted, Lost

MAX_RETRIES = 2
"""How often a job whose lane failed is tried again; after that its node is dropped, unjudged."""


@dataclass(frozen=True)
class ArmStats:
    """What an arm's proposals cost and gave."""

    requests: int = 0
    proposals: int = 0
    """As they came."""
    new: int = 0
    """Of these, what was not known before."""
    measured: int = 0
    failed: int = 0
    """Of the measured, what did not run or was wrong."""
    gain: float = 0.0
    """Sum over its measured nodes of max(0, -log2_ratio), each against the incumbent of its time."""
    squares: float = 0.0
    """Sum of the squares of the same."""
    seconds: float = 0.0
    """Wall seconds of judging its nodes."""
    spent: SearchCost = SearchCost()
    """On its proposals."""

    def __add__(self, other: ArmStats) -> ArmStats:
        return ArmStats(
            self.requests + other.requests,
            self.proposals + other.proposals,
            self.new + other.new,
            self.measured + other.measured,
            self.failed + other.failed,
            self.gain + other.gain,
            self.squares + other.squares,
            self.seconds + other.seconds,
            self.spent + other.spent,
        )


@dataclass(frozen=True)
class DuplicateProposal:
    """A proposal that was not new."""

    node: Node
    original_id: str
    """Id of the node that it repeats."""
    reason: str


@dataclass
class Batch:
    """What became of one batch."""

    number: int
    answers: dict[str, Proposed] = field(default_factory=dict)
    """By request."""
    closed: bool = False
    """All requests are answered; `nodes` is final."""
    nodes: tuple[str, ...] = ()
    """The new ones among its proposals, in the order of request ids and positions."""
    forecasted: Forecasted | None = None
    chosen: Chosen | None = None
    finished: dict[str, NodeResult] = field(default_factory=dict)
    """By node, as they were judged: without what full verification said later."""
    lost: dict[str, list[Lost]] = field(default_factory=dict)
    """By node."""
    scores: dict[str, float] = field(default_factory=dict)
    """log2(time / time of the first seed) by node, of all that ran, as they were timed."""
    verifications: int = -1
    """How many `Verified` the log held when this batch ended: what batches that rest on it may know of them. -1
    before."""

    @property
    def dropped(self) -> frozenset[str]:
        """Nodes whose lanes failed too often."""
        return frozenset(
            n for n, lost in self.lost.items() if len(lost) > MAX_RETRIES and n not in self.finished
        )

    @property
    def open(self) -> tuple[str, ...]:
        """Nodes still to be judged."""
        done = self.dropped
        chosen = self.chosen.nodes if self.chosen is not None else ()
        return tuple(n for n in chosen if n not in self.finished and n not in done)

    @property
    def ended(self) -> bool:
        """Everything chosen is judged or dropped."""
        return self.chosen is not None and not self.open

    @property
    def proposing_cost(self) -> SearchCost:
        """What its proposals cost."""
        return total_cost(a.spent for _, a in sorted(self.answers.items()))

    @property
    def forecasting_cost(self) -> SearchCost:
        """What its forecasts cost."""
        return self.forecasted.spent if self.forecasted is not None else SearchCost()

    @property
    def measuring_cost(self) -> SearchCost:
        """What judging its nodes cost."""
        return total_cost(measurement_cost(judged) for _, judged in sorted(self.finished.items()))

    @property
    def spent(self) -> SearchCost:
        """What it cost so far."""
        return self.proposing_cost + self.forecasting_cost + self.measuring_cost


@dataclass(frozen=True)
class HistoryPoint:
    """One measurement of the history."""

    measurements: int
    """How many there were with it."""
    node: str
    batch: int
    reason: str
    """Why it was measured; `seed` for batch 0."""
    score: float | None
    best: float
    """Lowest score so far."""
    device_seconds: float
    """Spent on measuring so far."""


def total_cost(parts: Iterable[SearchCost]) -> SearchCost:
    """The sum, in the order given: sums of floats depend on it, and decisions on them."""
    return sum(parts, SearchCost())


def measurement_cost(judged: NodeResult) -> SearchCost:
    """What judging a node cost: one measurement, however many configs it tried or how far it got."""
    return SearchCost(1, judged.device_seconds, judged.wall_seconds)


def arm_stats(
    batch: Batch, nodes: Mapping[str, Node], known: Mapping[str, NodeResult]
) -> dict[str, ArmStats]:
    """What each arm asked in a batch cost, and what the nodes measured in it gave to the arms they came of.

    `known`: results by node, with what full verification said of them. The seeds belong to no arm.
    """
    found: dict[str, ArmStats] = {}
    if batch.number == 0:
        return found
    for _, answer in sorted(batch.answers.items()):
        asked = ArmStats(requests=1, proposals=len(answer.nodes), spent=answer.spent)
        found[answer.arm] = found.get(answer.arm, ArmStats()) + asked
    for node in batch.nodes:
        arm = nodes[node].arm
        found[arm] = found.get(arm, ArmStats()) + ArmStats(new=1)
    for node in sorted(batch.finished):
        judged = known[node]
        arm, ran = nodes[node].arm, judged.log2_ratio is not None
        gain = max(0.0, -(judged.log2_ratio or 0.0))
        gave = ArmStats(
            measured=1, failed=int(not ran), gain=gain, squares=gain * gain, seconds=judged.wall_seconds
        )
        found[arm] = found.get(arm, ArmStats()) + gave
    return found
