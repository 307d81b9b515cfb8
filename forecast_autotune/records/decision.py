"""The records of the loop's plans and decisions: `Plan`, `Cost`, `RiskVerdict`, `Decision`.

A decision that rests on nothing cannot claim to be measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import attrgetter

from forecast_autotune.errors import RecordError
from forecast_autotune.records.candidate import Candidate, Evidence
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.json_fields import (
    LARGEST_MS,
    LARGEST_S,
    SCHEMA,
    number_within,
    or_null,
    read_share,
)

_SHARE = json_option(read=read_share)
_AMOUNT = json_option(read=number_within(0.0, LARGEST_S))
"""Seconds, money or a tolerance."""
_TIME = json_option(read=or_null(number_within(5e-324, LARGEST_MS)))


@dataclass(frozen=True)
class MeasuringCost:
    """Seconds used so far by a measurer."""

    compile_s: float = 0.0
    """Sum over candidates."""
    timing_s: float = 0.0
    compiled: int = 0
    wall_s: float = 0.0
    """Wall (or, in replay, simulated wall) seconds."""


@dataclass(frozen=True)
class Plan:
    """Which candidates to measure next, and why. An empty `measure` means: stop, trust the rest."""

    measure: tuple[Candidate, ...]
    reason: str
    """A sentence a user can read."""
    risk: float
    """P(the regret of the choice so far exceeds the tolerance), by the forecasts."""
    prefetch: tuple[Candidate, ...] = ()
    """Candidates to compile on idle cores, as the next round probably measures them."""
    audit: tuple[Candidate, ...] = ()
    """Members of `measure` that are there by chance, not by merit, to check the forecasts."""
    audit_probability: float = 0.0
    within_s: float | None = None
    """Make the next plan as soon as something was measured, or after so many seconds; None: after all of it."""


@dataclass(frozen=True)
class LLMConsultation(Record, label="consultation", lenient=True):
    """A language model's part in a decision, also where it was not asked."""

    model: str
    """Kind, model and adapter."""
    prompt: str = ""
    """Version of the prompt."""
    calibration: str = ""
    """Mark of the calibration of its answer."""
    weight: float = 0.0
    """Weight of its forecast against the learned one, on the average of both beliefs."""
    tokens: int = 0
    """Tokens of prompts and answers together."""
    seconds: float = field(default=0.0, metadata=_AMOUNT)
    """Wall seconds that it worked; others may have worked at the same time."""
    money: float = field(default=0.0, metadata=_AMOUNT)
    trouble: str = ""
    """Why it was not heard although it was asked; empty otherwise."""
    asked: bool = True
    why: str = ""
    """Why it was asked, or was not."""
    moved_in: int = 0
    """Candidates that the first plan with its answer measures, and that the plan without it does not."""
    moved_out: int = 0
    """Candidates that the plan without its answer measures, and that the first plan with it does not."""

    @property
    def effect(self) -> str:
        """The candidates it moved, in words; empty where it moved nothing."""
        if not (self.moved_in or self.moved_out):
            return ""
        plural = "" if self.moved_in == 1 else "s"
        return f"moved {self.moved_in} candidate{plural} into and {self.moved_out} out of the plan"

    def __str__(self) -> str:
        if not self.asked:
            return f"language model not asked: {self.why}"
        text = f", {self.effect}" if self.effect else ""
        if self.trouble:
            return f"without {self.model}: {self.trouble}{text}"
        why = f" ({self.why})" if self.why else ""
        return f"{self.model} at weight {self.weight:.2f}{text}{why}"


@dataclass(frozen=True)
class Cost(Record, label="cost", unknown="refuse"):
    """The cost of a decision, in seconds of wall time unless said otherwise."""

    wall_s: float = field(default=0.0, metadata=_AMOUNT)
    forecast_s: float = field(default=0.0, metadata=_AMOUNT)
    """Tracing, features, forecasts and planning."""
    compile_s: float = field(default=0.0, metadata=_AMOUNT)
    """Sum over candidates; runs in parallel, so it may exceed `wall_s`."""
    timing_s: float = field(default=0.0, metadata=_AMOUNT)
    compiled: int = 0
    llm_s: float = field(default=0.0, metadata=_AMOUNT)
    """Seconds that a language model worked; compilations may have gone on at the same time."""
    llm_tokens: int = 0
    llm_money: float = field(default=0.0, metadata=_AMOUNT)
    """In the currency of the configured prices."""

    def with_llm(self, consulted: LLMConsultation | None) -> Cost:
        """The same with the cost of a language model, if one was asked."""
        if consulted is None:
            return self
        return replace(self, llm_s=consulted.seconds, llm_tokens=consulted.tokens, llm_money=consulted.money)


@dataclass(frozen=True)
class RiskVerdict(Record, label="verdict", lenient=True):
    """The check of a stated risk by later measurements; probabilities and shares in [0, 1]."""

    surrogate: str
    """`name/version` of the surrogate that stated the risk."""
    shipped: float
    """The risk by the surrogate's own calibration."""
    stated: float
    """The risk as it was stated, with this store's correction at that time."""
    beaten: bool
    """Whether one of the measured candidates beat the choice by more than the tolerance."""
    share: float
    """The share of the trusted candidates that were measured afterwards."""

    def __post_init__(self) -> None:
        shares = (self.shipped, self.stated, self.share)
        if not all(0.0 <= p <= 1.0 for p in shares) or self.share <= 0.0:
            raise RecordError(
                f"a verdict needs probabilities and a share above 0, all at most 1, got {shares}"
            )


@dataclass(frozen=True)
class Decision(
    Record,
    tag="decision",
    schema=SCHEMA,
    lenient=True,
    order=(
        *("problem", "chosen", "evidence", "cost", "rounds", "surrogate", "shipped_risk", "verdicts"),
        *("reason", "stated_risk", "tolerance", "candidates", "measured", "known", "trusted", "refused"),
        *("median_ms", "saved_s", "settings", "at", "llm", "advice", "ties", "rechecks", "doubt"),
    ),
):
    """The chosen candidate with its evidence, stated risk and cost."""

    problem: str
    chosen: Candidate = field(metadata=json_option(flat=True))
    evidence: Evidence
    reason: str
    stated_risk: float = field(metadata=_SHARE)
    tolerance: float = field(metadata=_AMOUNT)
    candidates: int
    measured: int
    """Candidates timed or found failing for this decision."""
    known: int = 0
    """Candidates whose measurement came from the store."""
    trusted: int = 0
    """Candidates decided without a measurement, except the refused ones."""
    refused: int = 0
    """Candidates never compiled because they cannot launch."""
    median_ms: float | None = field(default=None, metadata=_TIME)
    saved_s: float = field(default=0.0, metadata=json_option(read=number_within(-LARGEST_S, LARGEST_S)))
    """Estimated seconds that compiling the trusted candidates would have taken on top."""
    cost: Cost = Cost()
    settings: str = ""
    """Digest of candidates and settings the decision depends on; a stored one must match."""
    at: str = ""
    rounds: tuple[str, ...] = ()
    """The plans' reasons, in order."""
    surrogate: str = ""
    """`name/version` of the surrogate that states the risk."""
    shipped_risk: float | None = field(default=None, metadata=json_option(read=or_null(read_share)))
    """The stated risk before this store's correction."""
    verdicts: tuple[RiskVerdict, ...] = ()
    """Verdicts on the risks stated for this problem, audits included; oldest first."""
    llm: LLMConsultation | None = field(default=None, metadata=json_option(omit_null=True))
    """The language model's part, asked or not; None where none was named."""
    advice: str = field(default="", metadata=json_option(when=attrgetter("advice")))
    """The effect of a language model's advice on the kernel; "" where there was none to follow."""
    ties: tuple[Candidate, ...] = field(default=(), metadata=json_option(when=attrgetter("ties")))
    """Other candidates as fast as the chosen one, within noise; every process chooses among them by the same rules."""

    rechecks: int = field(default=0, metadata=json_option(when=attrgetter("rechecks")))
    """Comparisons of an untimed choice with other candidates since the decision (`tuning.rechecks`)."""
    doubt: float = field(default=0.0, metadata=json_option(when=attrgetter("rechecks")))
    """Stakes won against the choice in these comparisons."""

    @property
    def is_kept(self) -> bool:
        """Whether later calls may rely on the decision: a guess while nothing could be timed has no settings."""
        return self.evidence is not Evidence.FORECAST or bool(self.settings)

    @property
    def is_untimed(self) -> bool:
        """Whether the choice was accepted on forecasts alone, here or in an earlier process."""
        return self.median_ms is None and not self.known and not self.measured

    def agrees_with(self, other: Decision) -> bool:
        """Whether another decision on the problem chose the same, or one that tied with this choice for either."""
        return other.chosen in (self.chosen, *self.ties) or self.chosen in other.ties
