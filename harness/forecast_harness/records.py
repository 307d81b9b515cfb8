"""The nouns of a search: its target (`SearchTarget`), its sources (`Node`), its settings (`SearchSettings`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from forecast_autotune.records import Outcome
from forecast_autotune.variants.records import Provenance

SCHEMA = 1
MIN_PROGRESS = math.log2(1.005)
"""A node must be so much faster (log2) than the best before to count as progress: half a per cent."""


class TargetKind(StrEnum):
    """The kind of a target."""

    PACK = "pack"
    """A problem pack; a node's source is a `Solution`'s."""
    KERNEL = "kernel"
    """A decorated Triton kernel; a node's source is a `Variant`'s."""


@dataclass(frozen=True)
class SearchTarget:
    """The target of a search. Plain data; `payload` is what the judge needs to rebuild it in another process."""

    kind: TargetKind
    name: str
    id: str
    """Changes when the question changes: pack id, or source hash of kernel and cases."""
    language: str
    """`torch`, `triton` or `cuda`: the language of new nodes, unless they say otherwise."""
    entry: str
    """The name that a source must define."""
    statement: str = field(repr=False)
    """The computation, its sizes and the rules for a source, in words: for prompts and reports."""
    payload: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Node:
    """One source that was proposed. Immutable; its result is in the state."""

    id: str
    """`node_identity`: digest of the target, the language and the normalised source."""
    source: str = field(repr=False)
    language: str
    parents: tuple[str, ...]
    """Ids of the nodes it was made of; empty for a seed. The first is the one it was derived from."""
    provenance: Provenance
    arm: str = ""
    """Author and style that made it."""
    batch: int = 0
    request: str = ""
    """Id of the request it answers; empty for a seed."""


MODEL_NOTE = "; model "
"""The mark in the note of a forecast that a language model moved; the change follows it."""


@dataclass(frozen=True)
class NodeForecast:
    """A forecast of a node before it runs, relative to `reference`.

    `mean` and `sd` are of log2(time of the node / time of the reference): negative is faster.
    """

    mean: float
    sd: float
    p_fail: float
    p_better: float
    """P(it runs and is faster than the reference)."""
    abstains: bool = False
    """The surrogate says that it does not know: always deferred to the clock as budget allows."""
    note: str = ""


_CONFIDENT_ERRORS = 2.0
"""Standard errors beyond which a difference is not chance."""
_FASTER_OUTCOME = "faster"
"""The text of a `ComparisonOutcome`."""


@dataclass(frozen=True)
class FullVerification:
    """The verdict on a node in one config, with fresh hidden seeds and in a fresh process."""

    outcome: Outcome
    wrong: str = ""
    """Why it is refused; '' where it is right."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """As in `NodeResult.facts`."""
    device_seconds: float = 0.0
    """0 where the device served others meanwhile."""
    wall_seconds: float = 0.0
    device: str = ""

    @property
    def is_right(self) -> bool:
        """Whether nothing was found wrong."""
        return self.outcome is Outcome.OK


@dataclass(frozen=True)
class NodeResult:
    """The result of running a node. `log2_ratio` is paired: node over `against`, side by side in one process."""

    outcome: Outcome
    against: str = ""
    """Id of the node it was timed beside."""
    log2_ratio: float | None = None
    """Geometric mean over workloads of log2(time / time of `against`); None unless the outcome is `ok`."""
    sd: float = 0.0
    """Standard error of `log2_ratio`."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Median time per workload."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The best config that nested tuning found; empty where there is none to choose."""
    measurements: int = 0
    """Configs that were timed."""
    device_seconds: float = 0.0
    wall_seconds: float = 0.0
    device: str = ""
    """UUID, or slug, of what it ran on."""
    stage: str = ""
    """The last stage that it reached: `screen`, `compile`, `verify`, `time`, `confirm`."""
    feedback: str = ""
    """Why it was refused, for a repair prompt: bounded, never the hidden seeds."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Behaviour (registers, shared memory, ...) and harness facts."""

    def __post_init__(self) -> None:
        if (self.outcome is Outcome.OK) != (self.log2_ratio is not None):
            raise ValueError(
                f"a node judged {self.outcome} {'needs' if self.outcome is Outcome.OK else 'cannot have'} a "
                "log2_ratio"
            )

    @property
    def may_lead(self) -> bool:
        """Whether it may be called the fastest: it ran, and nothing of its verification was left out."""
        return self.log2_ratio is not None and self.facts.get("verified_in_full") is not False

    @property
    def is_unverified_gain(self) -> bool:
        """Whether it seemed faster than what it was timed beside, and may not lead before full verification."""
        return self.log2_ratio is not None and self.log2_ratio < 0.0 and not self.may_lead

    def with_verification(self, verification: FullVerification) -> NodeResult:
        """The result once it is verified in full: it may lead, or it was refused and has no time."""
        if self.log2_ratio is None:
            return self
        if verification.is_right:
            return replace(self, facts={**self.facts, **verification.facts, "verified_in_full": True})
        return replace(
            self,
            outcome=verification.outcome,
            log2_ratio=None,
            sd=0.0,
            seconds={},
            stage="verify",
            feedback=verification.wrong,
            facts={**self.facts, **verification.facts},
        )

    @property
    def evidence(self) -> str:
        """The verdict of a confirmation on "faster than `against`": `confirmed`, `undecided` or `refuted`.

        Two standard errors decide: an interval that holds 1 confirms nothing. A contest of two solutions must have
        ended so, too (`standing`).
        """
        if self.log2_ratio is None:
            return "refuted"
        faster = self.facts.get("standing", _FASTER_OUTCOME) == _FASTER_OUTCOME
        return "confirmed" if faster and self.log2_ratio + _CONFIDENT_ERRORS * self.sd < 0.0 else "undecided"

    @property
    def other_calls_text(self) -> str:
        """The calls at which it is slower, for a person; empty where it is at none."""
        ratios = self.facts.get("each_call", {})
        each = [f"{n} ({2 ** -ratios[n][0]:.2f} times)" for n in self.facts.get("slower_at", ())]
        return f"slower at some calls, use it at the others alone: {', '.join(each)}" if each else ""

    @property
    def faster_at(self) -> tuple[str, ...] | None:
        """The calls at which it may take the base's place, where it is slower at others; None: all."""
        slower = self.facts.get("slower_at", ())
        return tuple(n for n in self.facts.get("each_call", {}) if n not in slower) if slower else None


EVIDENCE_TEXTS = {
    "": "not confirmed",
    "confirmed": "confirmed in a fresh process",
    "undecided": "timed again in a fresh process and not shown to be faster",
    "refuted": "refused in a fresh process",
}
"""Words for a source by the evidence for it; the first: it was not timed again."""


@dataclass(frozen=True)
class SearchCost:
    """The cost of a search, or of a part of it."""

    measurements: int = 0
    """Candidates run on the device: the unit of `SearchBudget.measurements`."""
    device_seconds: float = 0.0
    wall_seconds: float = 0.0
    tokens: int = 0
    money: float = 0.0
    """US dollars."""

    def __add__(self, other: SearchCost) -> SearchCost:
        return SearchCost(*(a + b for a, b in zip(self._amounts(), other._amounts(), strict=True)))

    def _amounts(self) -> tuple[Any, ...]:
        return (self.measurements, self.device_seconds, self.wall_seconds, self.tokens, self.money)


@dataclass(frozen=True)
class ProposalRequest:
    """Asks one proposer for `n` sources made of `parents`. Everything it needs; no state is passed along."""

    id: str
    """Digest of the seed, batch, parents, arm and number."""
    batch: int
    arm: str
    """`<proposer>/<style>`"""
    target: SearchTarget
    parents: tuple[Node, ...]
    judged: Mapping[str, NodeResult]
    """Results of the parents and of `failures`, by node id."""
    score: float
    """log2(time of the first parent / time of the first seed)."""
    n: int
    seed: int
    failures: tuple[Node, ...] = ()
    """Children of the first parent that were refused or slower, newest last, for repair and feedback."""
    known: tuple[str, ...] = field(default=(), repr=False)
    """Ids of all nodes so far, which need not be proposed again."""


@dataclass(frozen=True)
class Proposed:
    """A proposer answered a request, perhaps with nothing."""

    request: str
    nodes: tuple[Node, ...]
    """All nodes of the answer; the state decides which of them are new."""
    spent: SearchCost = SearchCost()
    problem: str = ""
    """Why there are none: the proposer failed, or has no more to give."""
    exhausted: bool = False
    """The proposer will never have more for this parent."""
    batch: int = 0
    """This and the next two are copied from the request by the runner, so that a log explains itself."""
    arm: str = ""
    parent: str = ""
    """Id of the request's first parent."""


@dataclass(frozen=True)
class SearchBudget:
    """The most that may be spent; None is no limit."""

    measurements: int | None = 200
    device_seconds: float | None = None
    wall_seconds: float | None = None
    """Seconds of the clock, from the start to the last confirmation; see `run`."""
    tokens: int | None = None
    money: float | None = None

    def exhausted(self, spent: SearchCost) -> str:
        """The limit that has been reached, as a text for people; empty if none."""
        for name, limit in vars(self).items():
            if limit is not None and getattr(spent, name) >= limit:
                return f"{name.replace('_', ' ')} {getattr(spent, name):g} of {limit:g} spent"
        return ""


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search. All are part of the context: a resumed search must have the same."""

    budget: SearchBudget = SearchBudget()
    archive: str = "puct"
    """`puct` or `greedy`."""
    proposers: tuple[str, ...] = ("mechanical",)
    """As on the command line: `mechanical`, `files:DIR`, `recorded:DIR`, `llm:SPEC`."""
    surrogate: str = "auto"
    """`auto`, `none` (measure what comes first), or a spec of `forecasters`."""
    parents: int = 2
    """Nodes expanded per batch."""
    samples: int = 16
    """Proposals per parent."""
    k: int = 4
    """Measurements per parent at most, audits included."""
    audit: float = 0.1
    """Share of a batch's measurements given to candidates the forecasts reject, drawn at random."""
    depth: int = 2
    """Batches under way at once: batch n is decided on what batches up to n - depth gave. 1 waits for each
    batch to end. Fixed, so that what is decided never depends on which result came first. Full
    verifications run beside that: batches that rest on a batch know those that had ended with it."""
    patience: int = 8
    """Batches in a row without a better node, or without a new one, after which a search ends."""
    trials: int = 12
    """Configs of one node that nested tuning may time."""
    seed: int = 0


@dataclass(frozen=True)
class SearchContext:
    """The facts that must be equal for a log to be continued."""

    target: str
    """`SearchTarget.id`"""
    seeds: tuple[str, ...]
    """Ids of the nodes that it starts from; the first is the one speed-ups are stated against."""
    device: str
    """Slug of the device (several of one model are the same; each has its own UUID in `NodeResult.device`)."""
    toolchain: Mapping[str, str]
    surrogate: str
    """Name and version of what forecasts, or `none`."""
    harness: str
    """`harness_hash`: how nodes are verified and timed."""
    settings: SearchSettings = SearchSettings()
    arms: tuple[str, ...] = ()
    """`<proposer>/<style>` of all that may propose; filled in by `run.search`."""
    schema: int = SCHEMA


@dataclass(frozen=True)
class NodeJob:
    """Asks a judge to verify, tune and time a node beside `against`."""

    id: str
    """Digest of the target, harness, node and `against`, and a number where it was lost before: a job of one
    id is done once."""
    node: Node
    against: Node
    against_config: Mapping[str, Any]
    """The best known config of `against`."""
    target: SearchTarget
    batch: int
    trials: int
    confirm: bool = False
    against_score: float = 0.0
    """log2(time / time of the first seed) of `against`."""


@dataclass(frozen=True)
class VerificationJob:
    """Asks a judge to verify a node in full, that was timed and found right at the timed sizes alone."""

    id: str
    """As `NodeJob.id`."""
    node: Node
    config: Mapping[str, Any]
    """The config that it was timed with."""
    target: SearchTarget


@dataclass(frozen=True)
class ConfirmationJob:
    """Asks for the finalists to be timed again."""

    nodes: tuple[Node, ...]
    """The best first."""
    configs: Mapping[str, Mapping[str, Any]]
    seed_node: Node
    target: SearchTarget
    seconds: float | None = None
    """Wall seconds left for it; where they do not suffice for all, the first is confirmed anyway."""
