"""Searches against an exhaustive record of sources and configs: the real search, nested tuning replayed.

A node of the search is a source; judging it times at most `trials` of its configs, and each of these is one
evaluation, whatever comes of it. A source that is wrong costs one. The arms differ in who chooses:

    unfiltered     sources as they are dealt, in random order; configs drawn at random
    configs only   sources as they are dealt; configs by forecasts
    sources only   sources by forecasts, as the product's search does it; configs drawn at random
    filtered       both by forecasts
    updated        the same, and forecasts of configs learn from all that the run itself has timed: what the
                   product does, whose lanes learn from what each of them has timed (`judge_kernel`)
    judged         the same, but sources by judgements that were made before (`forecasters.recorded`)
    oracle         knows the record: the best sources, their best config first

Where the base is said to be tuned already, its recorded configs cost nothing and all arms know the best of
them; `updated` knows all of their times.

In every arm a source is first timed with the best config of the node that it is timed beside (the base, at
first), where it can run it: what anyone would do. Forecasts are a surrogate's that was fitted without the
whole family of kernels; of what was recorded they see what their own run has timed, and nothing else.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from benchmarks.lib.search import candidate_pool
from benchmarks.lib.search.pool_replay import OracleForecaster, ReplayedSearch, run_recorded_search, told
from benchmarks.lib.search.source_pool import BASE
from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.records import Candidate, Config, Measurement, Outcome, digest
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.protocol import Query, Surrogate
from forecast_autotune.variants.judgement import SourceJudgement
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.search.forecasters.recorded import RecordedForecaster
from forecast_harness.search.forecasters.triton import TritonForecaster
from forecast_harness.search.forecasters.variant_tracing import (
    ConfigForecasts,
    is_compatible,
    most_promising,
)
from forecast_harness.search.history.events import ConfirmationJob, NodeJob
from forecast_harness.search.interfaces import Forecaster, LaneFailure, NodeJudge
from forecast_harness.search.novelty import node_identity
from forecast_harness.search.records import (
    Node,
    NodeResult,
    SearchBudget,
    SearchSettings,
    SearchTarget,
    TargetKind,
)

ARMS = ("unfiltered", "filtered", "updated", "configs only", "sources only", "oracle")
JUDGED = "judged by "
"""Beginning of the arms that are told judgements; whose they are follows."""
_STYLES = {"llm": "recorded/written", "mechanical": "mechanical/single"}
FAILED_OUTCOMES = (Outcome.INCORRECT, Outcome.COMPILE_ERROR)


@dataclass
class KernelRecord:
    """One kernel's record, and what a surrogate that has not seen its family says of it."""

    table: Table
    surrogate: Surrogate
    rows: dict[Candidate, Measurement] = field(init=False)
    candidates: CandidateList = field(init=False)
    by_variant: dict[str, list[Candidate]] = field(init=False)
    variants: dict[str, str] = field(init=False)
    """By id of the node."""
    pool: candidate_pool.PoolProblem = field(init=False)
    """The same with every source at its best: what is dealt, and what an oracle knows."""

    def __post_init__(self) -> None:
        """Raises `ValueError` for a record without a time of the base kernel."""
        problem, told = self.table.problem, self.table.problem.extra["sources"]
        self.rows = self.table.by_candidate()
        self.candidates = CandidateList.of(sorted(self.rows, key=lambda c: digest("row", str(c))))
        self.by_variant = {}
        for candidate in self.candidates:
            self.by_variant.setdefault(candidate.variant, []).append(candidate)
        if BASE not in self.by_variant or self.best(BASE) is None:
            raise ValueError(f"{problem.extra['label']}: the base kernel has no time to compare with")
        # A kernel is searched like a pack here: nothing of it is imported, or stored as a variant.
        target = SearchTarget(
            TargetKind.PACK, problem.extra["label"], problem.id, "triton", problem.kernel.name, ""
        )
        nodes: dict[str, Node] = {}
        judged: dict[str, NodeResult] = {}
        self.variants = {}
        seed = node_identity(target.id, "triton", told[BASE]["text"])
        for variant, one in told.items():
            ended = one.get("outcome", "")
            if variant != BASE and ended not in ("ok", *FAILED_OUTCOMES):
                continue  # not recorded to its end, or the harness's own trouble
            made = Provenance(Origin(one["origin"]) if variant != BASE else Origin.HAND, note=one["note"])
            id_ = node_identity(target.id, "triton", one["text"])
            if id_ in nodes:
                continue
            above = () if variant == BASE else (seed,)
            arm = _STYLES.get(one["origin"], "seed")
            nodes[id_] = Node(id_, one["text"], "triton", above, made, arm)
            judged[id_] = self._exhaustive(variant, Outcome(ended or "ok"), seed)
            self.variants[id_] = variant
        self.pool = candidate_pool.PoolProblem(target, (nodes[seed],), nodes, judged, dict.fromkeys(nodes, 1))

    def log2_ms(self, candidate: Candidate) -> float | None:
        """log2(milliseconds); None where it did not run."""
        row = self.rows[candidate]
        return math.log2(row.ms) if row.ok else None

    def best(self, variant: str) -> Candidate | None:
        """The fastest recorded config of a source."""
        fine = [c for c in self.by_variant.get(variant, ()) if self.rows[c].ok]
        return min(fine, key=lambda c: self.rows[c].ms, default=None)

    @property
    def yardstick(self) -> float:
        """log2(milliseconds) of the base kernel under its best recorded config: what scores are against."""
        best = self.best(BASE)
        assert best is not None
        return math.log2(self.rows[best].ms)

    @property
    def slowest(self) -> float:
        """log2(milliseconds) of the base kernel under its slowest recorded config."""
        return math.log2(max(self.rows[c].ms for c in self.by_variant[BASE] if self.rows[c].ok))

    def forecast(self, known: Sequence[Measurement] = ()) -> Mapping[str, ConfigForecasts]:
        """Forecasts of all configs by source, given what is measured."""
        problem = self.table.problem
        bare = replace(problem, ttir={})
        said = self.surrogate.forecast(
            Query(bare, self.candidates, self.table.grids(), known, ttir=problem.ttir)
        )
        rows = self.candidates.row_of
        found = {}
        for variant, own in self.by_variant.items():
            at = np.array([rows[c] for c in own], dtype=np.intp)
            configs = tuple(c.config for c in own)
            found[variant] = ConfigForecasts(configs, said.mean[at], said.sd[at], said.p_fail[at])
        return found

    @cached_property
    def before(self) -> Mapping[str, ConfigForecasts]:
        """Forecasts with nothing measured."""
        return self.forecast()

    def _exhaustive(self, variant: str, outcome: Outcome, seed: str) -> NodeResult:
        best = self.best(variant) if outcome is Outcome.OK else None
        if best is None:
            return NodeResult(Outcome.RUNTIME_ERROR if outcome is Outcome.OK else outcome, seed)
        row = self.rows[best]
        ratio = math.log2(row.ms) - self.yardstick
        return NodeResult(Outcome.OK, seed, ratio, sd=_standard_error(row), config=best.config.to_json())


def _standard_error(row: Measurement) -> float:
    """Standard error of log2(milliseconds)."""
    return row.error_ms / row.ms / math.log(2.0)


class RecordTraceReader:
    """What the search's forecaster asks of a tracer: `forecasters.triton.Reader` over a record."""

    version = "held-out"

    def __init__(self, recorded: KernelRecord) -> None:
        self._recorded = recorded

    def prepare(self, nodes: Sequence[Node]) -> None:
        """All was traced before."""

    def best_forecast(self, node: Node) -> tuple[float, float] | None:
        """(log2 ms, P(fails)) of a source's most promising config, with nothing measured."""
        found = self._recorded.before.get(self._recorded.variants[node.id])
        if found is None:
            return None
        best = found.order[0]
        return float(found.mean[best]), float(found.p_fail[best])

    def close(self) -> None:
        """Nothing is held."""


class NestedJudge(NodeJudge):
    """Judges a source by the best of the configs that an arm times, from the record."""

    def __init__(
        self, recorded: KernelRecord, arm: str, trials: int, budget: int, seed: int, tuned: bool = False
    ) -> None:
        """`tuned`: the base's configs were timed before, at no cost; judging it costs one evaluation."""
        self._recorded, self._arm, self._trials = recorded, arm, trials
        self._budget, self._seed, self._tuned = budget, seed, tuned
        self.timed: dict[str, list[Candidate]] = {}
        """Configs tried per node, in order; a source that is wrong has none, and cost one evaluation."""
        self._best: dict[str, Candidate] = {}

    def judge(self, job: NodeJob) -> NodeResult:
        """See `Judge`."""
        node, against = job.node.id, job.against.id
        recorded = self._recorded
        exhaustive = recorded.pool.judged[node]
        if exhaustive.outcome in FAILED_OUTCOMES:
            self.timed[node] = []
            return replace(exhaustive, against=against, measurements=1, device_seconds=1.0)
        tried = self._chosen(recorded.variants[node], job.against_config, node)
        self.timed[node] = tried
        fine = [c for c in tried if recorded.rows[c].ok]
        cost: dict[str, Any] = {"measurements": len(tried), "device_seconds": float(len(tried))}
        if not fine:
            return NodeResult(recorded.rows[tried[0]].outcome, against, **cost)
        best = min(fine, key=lambda c: recorded.rows[c].ms)
        self._best[node] = best
        ratio, sd = self._beside(node, against)
        return NodeResult(Outcome.OK, against, ratio, sd, config=best.config.to_json(), **cost)

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        """The same numbers again: what is confirmed was measured when the record was."""
        first, found = confirm.seed_node.id, {}
        for node in (*confirm.nodes, confirm.seed_node):
            ratio, sd = self._beside(node.id, first)
            found[node.id] = NodeResult(Outcome.OK, first, ratio, sd)
        return found

    def close(self) -> None:
        """Nothing is held."""

    def _beside(self, node: str, against: str) -> tuple[float, float]:
        if node == against:
            return 0.0, 0.0
        if against not in self._best:
            raise LaneFailure(f"{against} was not judged in this run")
        mine, theirs = (self._recorded.rows[self._best[n]] for n in (node, against))
        return math.log2(mine.ms / theirs.ms), math.hypot(_standard_error(mine), _standard_error(theirs))

    def _chosen(self, variant: str, beside: Mapping[str, Any], node: str) -> list[Candidate]:
        """At most `trials` configs of a source, the one that suits its rival first."""
        own, best = self._recorded.by_variant[variant], self._recorded.best(variant)
        if self._tuned and variant == BASE and best is not None:
            return [best]
        first = [c for c in own if beside and is_compatible(c.config, Config.from_json(beside))][:1]
        rest, left = [c for c in own if c not in first], self._trials - len(first)
        if self._arm == "oracle":
            return list(dict.fromkeys([*([best] if best else []), *first, *rest]))[: self._trials]
        if len(rest) <= left or self._arm in ("unfiltered", "sources only") or self._spent():
            # The same draw in all arms.
            random.Random(digest("configs", self._seed, node)).shuffle(rest)
            return [*first, *rest[:left]]
        said = self._said(variant, first)
        by_config = {c.config: c for c in rest}
        return [*first, *(by_config[c] for c in most_promising(said, list(by_config), left))]

    def _spent(self) -> bool:
        """Whether nothing that comes now is read: forecasts would be for nothing."""
        return sum(max(1, len(t)) for t in self.timed.values()) >= self._budget

    def _said(self, variant: str, without: Sequence[Candidate]) -> ConfigForecasts:
        """Forecasts of a source's configs but those that are timed anyway."""
        recorded = self._recorded
        said = recorded.before[variant]
        if self._arm == "updated" or self._arm.startswith(JUDGED):
            before = recorded.by_variant[BASE] if self._tuned else []
            timed = dict.fromkeys([*before, *(c for tried in self.timed.values() for c in tried)])
            said = recorded.forecast([recorded.rows[c] for c in timed])[variant]
        return said.excluding([c.config for c in without])


def replay_sources(
    recorded: KernelRecord,
    arm: str,
    *,
    budget: int,
    seed: int,
    trials: int,
    settings: SearchSettings,
    tuned: bool = False,
    judgements: Mapping[str, SourceJudgement] | None = None,
) -> ReplayedSearch:
    """Search a record. `budget` counts evaluations, `trials` are those of one source at most.

    `judgements` are those of an arm that begins with `JUDGED`. Raises `ValueError` for an arm that is none of
    these and none of `ARMS`.
    """
    judged = arm.startswith(JUDGED) and judgements is not None
    if arm not in ARMS and not judged:
        raise ValueError(f"an arm is one of {', '.join(ARMS)}, not {arm!r}")
    forecaster: Forecaster | None = None
    if arm == "oracle":
        forecaster = OracleForecaster(recorded.pool)
    elif judged or arm in ("filtered", "updated", "sources only"):
        forecaster = TritonForecaster(recorded.pool.target, RecordTraceReader(recorded))
    if judged and judgements is not None and forecaster is not None:
        forecaster = RecordedForecaster(judgements, forecaster)
    judge = NestedJudge(recorded, arm, trials, budget, seed, tuned)
    # Enough sources for the budget even where most have few configs.
    nodes = SearchBudget(min(len(recorded.pool.nodes), budget))
    chosen = replace(settings, budget=nodes, surrogate=arm, seed=seed, trials=trials)
    state = run_recorded_search(recorded.pool, judge, forecaster, chosen)
    # Until something has run, there is at worst a slow config of the base.
    best, lowest = list[float](), recorded.slowest - recorded.yardstick
    for point in state.history:
        times = [recorded.log2_ms(c) for c in judge.timed[point.node]] or [None]
        for time in times:
            lowest = lowest if time is None else min(lowest, time - recorded.yardstick)
            best.append(lowest)
    reason = state.stopped.reason if state.stopped is not None else ""
    name = recorded.pool.target.name
    return ReplayedSearch(name, seed, arm, tuple(best[:budget]), tuple(told(state)), reason)
