"""The judge's verdict on a solution: accepted, or every reason why not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from forecast_autotune.records import Outcome
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.json_fields import rounded


class Judgement(StrEnum):
    """The judgement on a solution: accepted, or by whose fault it was not."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    """The candidate is wrong, fails or does not do the task: a label."""
    SUSPICIOUS = "suspicious"
    """The candidate does something that honest code does not do: quarantine, never a label."""
    INFRASTRUCTURE = "infrastructure"
    """The harness failed, and says nothing about the candidate: never a label."""


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
        """The judgement that this finding alone leads to."""
        if self.code is ReasonCode.HARNESS:
            return Judgement.INFRASTRUCTURE
        return Judgement.SUSPICIOUS if self.code in _SUSPICIOUS_CODES else Judgement.REJECTED


class ContestantRejected(Exception):
    """A contestant of a comparison, `INCUMBENT` or `CANDIDATE`, gave reasons to stop."""

    def __init__(self, which: int, reasons: Sequence[Reason]) -> None:
        super().__init__(f"contestant {which}: {reasons}")
        self.which, self.reasons = which, list(reasons)


CONFIDENCE = 0.99
"""Probability that a fault in the stated share of launches would have been found."""


@dataclass(frozen=True)
class CheckedLaunches(
    Record,
    label="checked launches",
    order=("launches", "timed", "seconds", "found_share", "found_share_timed"),
    derived={
        "found_share": lambda checked: round(checked.found_share, 6),
        "found_share_timed": lambda checked: round(found_share(checked.timed), 6),
    },
):
    """Launches of one solution whose results were compared with the reference, and when that was.

    A launch that is not checked shows nothing, so a solution that fails in fewer launches than `found_share` may
    well have passed. A fault that has not begun within `seconds` of the import, or that comes at a certain time of
    the day or week alone, is not found by any number of launches.
    """

    launches: int = 0
    timed: int = 0
    """Checked launches that were timed like all others, with contents that were new to the solution."""
    seconds: float = field(default=0.0, metadata=json_option(write=rounded(2)))
    """Wall seconds from the end of the import to the last check, in the process that lasted longest."""

    @property
    def found_share(self) -> float:
        """The least share of faulty launches that would have been found with 99 %; 1 for no launch."""
        return found_share(self.launches)

    def __add__(self, other: CheckedLaunches) -> CheckedLaunches:
        """The launches of two processes together."""
        return CheckedLaunches(
            self.launches + other.launches, self.timed + other.timed, max(self.seconds, other.seconds)
        )

    def __str__(self) -> str:
        if not self.launches:
            return "checked no launch"
        text = (
            f"checked {self.launches} launches up to {self.seconds:.1f} s after the import: a fault in "
            f"{100 * self.found_share:.2g} % of launches would have been found with {CONFIDENCE:.0%}"
        )
        if not self.timed:
            return text
        return f"{text}; of timed launches, {self.timed} of them, in {100 * found_share(self.timed):.2g} %"


def found_share(launches: int) -> float:
    """The share of faulty launches that so many checked launches would have shown with probability `CONFIDENCE`."""
    return 1.0 if launches <= 0 else 1.0 - (1.0 - CONFIDENCE) ** (1.0 / launches)


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
    """Remarks of static screening; never a reason by itself."""
    trials: int = 0
    checked: CheckedLaunches = CheckedLaunches()
    """The checked launches, and so how rare a fault would have been found."""
    seconds: float = field(default=0.0, metadata=json_option(write=rounded(4)))
    """Wall seconds of the whole verification."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Seeds, sandbox level, largest error over limit, harness hash, where the time went (`facts`)."""

    @property
    def judgement(self) -> Judgement:
        """The gravest of the reasons; accepted without any.

        A failure of the harness outweighs all else, because a candidate must not be blamed for it.
        """
        results = {r.judgement for r in self.reasons}
        for gravest in (Judgement.INFRASTRUCTURE, Judgement.SUSPICIOUS, Judgement.REJECTED):
            if gravest in results:
                return gravest
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


@cache
def fault_power() -> str:
    """How many known faults of each family verification refused, as a clause; `power.json` has the counts."""
    counts = json.loads((Path(__file__).parent / "power.json").read_text(encoding="utf-8"))["families"]
    return ", ".join(f"{family} {rejections} of {wrong}" for family, (rejections, wrong) in counts.items())


_MEMORY_RISE = 0.05


def memory_rise(own: Mapping[str, int], base: Mapping[str, int]) -> str:
    """The sentence on a source that holds more memory at a time than another, by workload; '' up to 5 %."""
    rises = [(own[n] / base[n] - 1, n) for n in own.keys() & base.keys() if base[n]]
    rise, name = max(rises, default=(0.0, ""))
    if rise <= _MEMORY_RISE:
        return ""
    return f"holds {rise:.0%} more memory at a time ({name}: {own[name]:,} against {base[name]:,} bytes)"
