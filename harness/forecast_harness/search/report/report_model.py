"""What happened in a search, in the shape in which people read it: entries, steps, arms, costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forecast_harness.records import (
    Node,
    NodeForecast,
    NodeResult,
    SearchBudget,
    SearchContext,
    SearchCost,
    SearchTarget,
)
from forecast_harness.search.events import Lost, Stopped
from forecast_harness.search.output import reliability
from forecast_harness.search.report.model_part import model_text
from forecast_harness.search.state import HistoryPoint, SearchState

Z90, Z95 = 1.6449, 1.9600
"""Two-sided 90 % and 95 % quantiles of the normal distribution."""


def speedup_interval(score: float, sd: float) -> tuple[float, float]:
    """95 % interval of a speed-up whose -log2 is `score` with a standard error of `sd`: (low, high)."""
    return float(2.0 ** -(score + Z95 * sd)), float(2.0 ** -(score - Z95 * sd))


@dataclass(frozen=True)
class ReportNode:
    """One node and all that is known of it."""

    node: Node
    number: int
    """0 for the first seed; then in the order in which nodes were accepted."""
    judged: NodeResult | None = None
    score: float | None = None
    """log2(time / time of the first seed); None unless it ran."""
    sd: float = 0.0
    """Standard error of `score`, along the chain of comparisons that leads to the first seed."""
    belief: NodeForecast | None = None
    """The last one from before it was judged."""
    reference: str = ""
    """What `belief` is relative to."""
    measured: float | None = None
    """log2(time / time of `reference`), to hold against `belief`; None unless it ran."""
    reason: str = ""
    propensity: float = 1.0
    status: str = ""
    """What became of it, in a word or two."""

    @property
    def is_unverified(self) -> bool:
        """Whether it seems faster and was not verified in full: it may not be called the best."""
        return self.judged is not None and self.judged.is_unverified_gain

    @property
    def kind(self) -> str:
        """`seed`, `faster` or `slower` (than the first seed), `failed`, `waiting`."""
        if not self.node.parents:
            return "seed"
        if self.judged is None:
            return "waiting"
        if self.score is None:
            return "failed"
        return "faster" if self.score < 0 else "slower"


@dataclass(frozen=True)
class ArmSummary:
    """What one proposer and style gave."""

    name: str
    requests: int
    proposals: int
    new: int
    measured: int
    ran: int
    better: int
    """Ran, and faster than what was the best when its batch was decided."""
    best: float | None
    """Lowest score of those of which nothing is left to verify."""
    spent: SearchCost


@dataclass(frozen=True)
class BestResult:
    """The end of a search, or where it stands: what is claimed, and how surely."""

    node: str
    score: float
    sd: float
    evidence: str
    """As `SearchState.evidence` has it."""

    @property
    def speedup(self) -> float:
        """Time of the first seed over its own."""
        return float(2.0**-self.score)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the speed-up."""
        return speedup_interval(self.score, self.sd)


@dataclass(frozen=True)
class SearchReport:
    """A whole search. Built by `build_report`, read by the report and the live view."""

    target: SearchTarget
    context: SearchContext
    at: str
    entries: Mapping[str, ReportNode]
    """By node id, in the order in which nodes were accepted."""
    history: Sequence[HistoryPoint]
    arms: Sequence[ArmSummary]
    total: SearchCost
    spent: Mapping[str, SearchCost]
    """By kind of work."""
    final: BestResult | None
    """None while nothing but the first seed has run."""
    confirmed: Mapping[str, NodeResult]
    lost: Sequence[Lost]
    problems: Counter[str]
    duplicates: Counter[str]
    """Proposals that were not new, by why."""
    stopped: Stopped | None
    resumed: int
    batch: int
    """The newest batch that anything is known of."""
    reliability: Mapping[str, Any] | None
    """Of the forecasts, weighed by 1 / propensity: see `output.reliability`."""
    model: str = ""
    """What language models did: `model_part.model_text`."""

    @property
    def root(self) -> str:
        """The seed that speed-ups are stated against."""
        return self.context.seeds[0]

    @property
    def budget(self) -> SearchBudget:
        """What may be spent at most."""
        return self.context.settings.budget

    @property
    def outcomes(self) -> Counter[tuple[str, str]]:
        """How often nodes ended so: (outcome, stage)."""
        return Counter((str(e.judged.outcome), e.judged.stage) for e in self.entries.values() if e.judged)


def build_report(state: SearchState) -> SearchReport:
    """What a state says. Raises `RecordError` before the search has started."""
    entries = _report_nodes(state)
    problems: Counter[str] = Counter()
    for answer in state.answers.values():
        if answer.problem:
            problems[f"{answer.arm}: {answer.problem}"] += 1
    for batch in state.batches.values():
        if batch.forecasted is not None and batch.forecasted.problem:
            problems[f"forecasts: {batch.forecasted.problem}"] += 1
    lost = [one for b in state.batches.values() for found in b.lost.values() for one in found]
    unverified = [one for found in state.lost_verifications.values() for one in found]
    return SearchReport(
        state.target,
        state.context,
        state.started.at if state.started else "",
        entries,
        tuple(state.history),
        _arm_summaries(state, entries),
        state.spent,
        dict(state.spent_on),
        _best_result(state, entries),
        dict(state.confirmed),
        [*lost, *unverified, *state.lost_confirmations],
        problems,
        Counter(r.reason for r in state.duplicates),
        state.stopped,
        state.resumed,
        max(state.batches, default=0),
        reliability(state),
        model_text(state),
    )


def _report_nodes(state: SearchState) -> dict[str, ReportNode]:
    chances = {
        name: chance
        for batch in state.batches.values()
        if batch.chosen is not None
        for name, chance in zip(batch.chosen.nodes, batch.chosen.propensities, strict=True)
    }
    found: dict[str, ReportNode] = {}
    for number, (name, node) in enumerate(state.nodes.items()):
        reference, belief = state.beliefs.get(name, ("", None))
        score = state.scores.get(name)
        measured = None
        if score is not None and reference in state.scores:
            measured = score - state.scores[reference]
        found[name] = ReportNode(
            node,
            number,
            state.judged.get(name),
            score,
            0.0,
            belief,
            reference,
            measured,
            state.reason(name),
            chances.get(name, 1.0),
            state.status(name),
        )
    for point in state.history:  # in this order whatever a node was timed beside comes before it
        entry = found[point.node]
        if entry.score is not None and entry.judged is not None and point.node != state.seeds[0]:
            sd = math.hypot(found[entry.judged.against].sd, entry.judged.sd)
            found[point.node] = replace(entry, sd=sd)
    return found


def _arm_summaries(state: SearchState, entries: Mapping[str, ReportNode]) -> list[ArmSummary]:
    found: list[ArmSummary] = []
    for name, stats in state.arms.items():
        own = [e for e in entries.values() if e.node.arm == name and e.judged is not None]
        ratios = [
            e.judged.log2_ratio for e in own if e.judged is not None and e.judged.log2_ratio is not None
        ]
        if stats.requests:  # the seeds' own is no arm
            found.append(
                ArmSummary(
                    name,
                    stats.requests,
                    stats.proposals,
                    stats.new,
                    stats.measured,
                    len(ratios),
                    sum(r < 0 for r in ratios),
                    min((e.score for e in own if e.score is not None and not e.is_unverified), default=None),
                    stats.spent,
                )
            )
    return found


def _best_result(state: SearchState, entries: Mapping[str, ReportNode]) -> BestResult | None:
    if not any(name != state.seeds[0] for name in state.scores):
        return None
    best = state.best
    judged = state.confirmed.get(best)
    sure = judged is not None and judged.log2_ratio is not None
    sd = judged.sd if judged is not None and sure else entries[best].sd
    return BestResult(best, state.best_score, sd, state.evidence(best))
