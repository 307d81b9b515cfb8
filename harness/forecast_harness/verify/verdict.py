"""What the judge says of a solution: accepted, or every reason why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Any

from forecast_autotune.records import Outcome
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.json_fields import rounded
from forecast_harness.verify.checked_launches import CheckedLaunches


class Judgement(StrEnum):
    """Whose doing it is that a solution has, or has not, been accepted."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    """The candidate is wrong, fails or does not do the task: a label."""
    SUSPICIOUS = "suspicious"
    """It does what honest code does not do: quarantine, never a label."""
    INFRASTRUCTURE = "infrastructure"
    """Nothing can be said about the candidate: never a label."""


class ReasonCode(StrEnum):
    """Reasons, one word per cause."""

    WRONG_STRUCTURE = "wrong_structure"
    """Another number of outputs, or something that is no plain tensor."""
    WRONG_SHAPE = "wrong_shape"
    WRONG_DTYPE = "wrong_dtype"
    WRONG_VALUES = "wrong_values"
    MUTATED_INPUT = "mutated_input"
    OUT_OF_BOUNDS = "out_of_bounds"
    """A byte outside every tensor changed."""
    ALIASES_INPUT = "aliases_input"
    """The output shares memory with an input, or with an earlier output."""
    LATE_WRITE = "late_write"
    """The output changed after the solution had returned."""
    NONDETERMINISTIC = "nondeterministic"
    NO_KERNEL = "no_kernel"
    """The result does not depend on the solution's own kernels."""
    LIBRARY_COMPUTES = "library_computes"
    """The framework does the arithmetic that the kernel claims to do."""
    STATE_DICT = "state_dict"
    """Parameters of the task are missing or have another shape."""
    FAILS = "fails"
    """Does not compile, raises, crashes or runs out of a limit."""
    TIMEOUT = "timeout"
    PATCHED = "patched"
    """Replaced a function of the clock, the framework or the harness."""
    GLOBAL_STATE = "global_state"
    """Changed a precision or default setting of the process."""
    THREADS = "threads"
    """Threads that it left running computed while nothing was asked."""
    CLOCK = "clock"
    """Two clocks disagree about how long it took."""
    IMPOSSIBLE = "impossible"
    """Faster than the bytes or operations allow."""
    COMPILES_WHILE_TIMED = "compiles_while_timed"
    ESCAPE = "escape"
    """The sandbox caught something that only an attack does."""
    HARNESS = "harness"
    """The harness itself failed."""


_SUSPICIOUS_CODES = {
    ReasonCode.PATCHED,
    ReasonCode.CLOCK,
    ReasonCode.IMPOSSIBLE,
    ReasonCode.ESCAPE,
    ReasonCode.LATE_WRITE,
    ReasonCode.THREADS,
}


@dataclass(frozen=True)
class Reason(Record, label="reason"):
    """One finding: its code, a sentence, and the trial in which it was made."""

    code: ReasonCode
    detail: str
    trial: str = ""

    @property
    def judgement(self) -> Judgement:
        """What this finding alone leads to."""
        if self.code is ReasonCode.HARNESS:
            return Judgement.INFRASTRUCTURE
        return Judgement.SUSPICIOUS if self.code in _SUSPICIOUS_CODES else Judgement.REJECTED


@dataclass(frozen=True)
class SolutionVerdict(
    Record,
    tag="verdict",
    schema=1,
    order=(
        "pack",
        "solution",
        "judgement",
        "outcome",
        "reasons",
        "hints",
        "trials",
        "checked",
        "seconds",
        "facts",
    ),
    derived={"judgement": attrgetter("judgement"), "outcome": attrgetter("outcome")},
):
    """The judgement on one solution of one pack, with all that led to it."""

    pack: str
    solution: str
    reasons: tuple[Reason, ...] = ()
    hints: tuple[str, ...] = ()
    """What static screening noticed; never a reason by itself."""
    trials: int = 0
    checked: CheckedLaunches = CheckedLaunches()
    """How many launches were checked, and so how rare a fault would have been found."""
    seconds: float = field(default=0.0, metadata=json_option(write=rounded(4)))
    """Wall seconds of the whole verification."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Seeds, sandbox level, largest error over limit, harness hash, where the time went (`facts`)."""

    @property
    def judgement(self) -> Judgement:
        """The gravest of the reasons; accepted without any.

        A failure of the harness outweighs all else, because a candidate must not be blamed for it.
        """
        found = {r.judgement for r in self.reasons}
        for one in (Judgement.INFRASTRUCTURE, Judgement.SUSPICIOUS, Judgement.REJECTED):
            if one in found:
                return one
        return Judgement.ACCEPTED

    @property
    def accepted(self) -> bool:
        """Whether the solution may be timed and used."""
        return self.judgement is Judgement.ACCEPTED

    @property
    def outcome(self) -> Outcome:
        """The outcome a measurement of it gets; only a candidate's own fault is a label."""
        if self.judgement is Judgement.ACCEPTED:
            return Outcome.OK
        if self.judgement is not Judgement.REJECTED:
            return Outcome.INFRASTRUCTURE
        codes = {r.code for r in self.reasons}
        if ReasonCode.TIMEOUT in codes:
            return Outcome.TIMEOUT
        return Outcome.RUNTIME_ERROR if ReasonCode.FAILS in codes else Outcome.INCORRECT
