"""The verdict: one record for every source, whatever its target is and whichever clock timed it.

Each stage of a trial ends in one of two ways: with a `Refusal`, which is the verdict already, or with what the next
stage needs. A source that comes through all of them is measured beside its rival, a `Contest`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forecast_autotune.records import Outcome
from forecast_harness.clocks.paired_comparison import CANDIDATE, INCUMBENT
from forecast_harness.clocks.times import matched_times
from forecast_harness.records import NodeResult
from forecast_harness.trials.race import log2_ratio
from forecast_harness.verify.verdict import Judgement, Reason, SolutionVerdict

_MOST_FEEDBACK_CHARACTERS = 1500
_TOLERANCE = math.log2(1.02)
"""The most by which a source may be slower at a call and still be served there, as a log2 ratio."""
COMPILE_ERRORS = re.compile(
    r"\b(SyntaxError|IndentationError|ImportError|ModuleNotFoundError|CompilationError|OutOfResources|"
    r"CompileTimeAssertionFailure|UnsupportedLanguageConstruct|AttributeError: module 'candidate')"
)
"""Errors of a source that never came to run."""


class Refusal(Exception):
    """A source's own failure at a stage of its trial; `outcome` is its label."""

    def __init__(
        self,
        outcome: Outcome,
        stage: str,
        detail: str,
        facts: Mapping[str, Any] | None = None,
        *,
        measurements: int = 1,
        device_seconds: float = 0.0,
    ) -> None:
        super().__init__(detail)
        self.outcome, self.stage, self.detail, self.facts = outcome, stage, detail, dict(facts or {})
        self.measurements, self.device_seconds = measurements, device_seconds

    @property
    def feedback(self) -> str:
        """Why it was refused, of a length that a prompt can bear."""
        return truncated_feedback(self.detail)

    def verdict(self, device: str, **facts: Any) -> NodeResult:
        """The refusal as the source's result."""
        return NodeResult(
            self.outcome,
            measurements=self.measurements,
            device_seconds=self.device_seconds,
            device=device,
            stage=self.stage,
            feedback=self.feedback,
            facts={**self.facts, **facts},
        )


@dataclass(frozen=True)
class Contest:
    """A source in its best config beside its rival."""

    log2_ratio: float
    """The log2 of its time over the rival's."""
    error: float
    """Standard error of `log2_ratio`."""
    seconds: Mapping[str, float]
    """Seconds of the source, by workload."""
    theirs: Mapping[str, float]
    """Seconds of its rival, by workload."""
    config: Mapping[str, Any]
    ranked: Sequence[tuple[Mapping[str, Any], float]]
    """Every config that was timed, and its log2 ratio."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the timing: `blocks`, at least."""
    text: str = ""
    """The result as a sentence for people and prompts, where that is not `times_beside`."""

    @classmethod
    def of_race(cls, value: Mapping[str, Any], configs: Sequence[Mapping[str, Any]]) -> Contest:
        """From the value of a timing job that has a winner; `configs`: those that were raced."""
        facts = {
            "blocks": len(value["differences"]),
            "ended": value["ended"],
            "checks": value["checks"],
        }
        seconds, theirs = (seconds_of_side(value, side) for side in (CANDIDATE, INCUMBENT))
        ranking = [(configs[int(n)], log2_ratio([d])[0]) for n, d in value["ranking"].items()]
        best = configs[value["winner"]]
        return cls(*log2_ratio(value["differences"]), seconds, theirs, best, ranking, facts)

    @property
    def each_call(self) -> dict[str, Any]:
        """See `call_facts`; empty where one call alone was timed, or it is not ahead."""
        if len(self.theirs) < 2 or self.log2_ratio >= 0:
            return {}
        own = matched_times(self.seconds, self.theirs, 2**self.log2_ratio)
        return call_facts({n: (math.log2(own[n] / s), self.error) for n, s in self.theirs.items()})

    def times_beside(self, beginning: str = "Right") -> str:
        """Its times beside the rival's, in words."""
        ratio = self.log2_ratio
        own = matched_times(self.seconds, self.theirs, 2**ratio)
        calls = [f"{n} {1e6 * s:.1f} us against {1e6 * self.theirs[n]:.1f} us" for n, s in own.items()]
        comparison = f"{2 ** abs(ratio):.3f} times {'slower' if ratio > 0 else 'faster'}"
        return f"{beginning}, and {comparison if ratio else 'not shown to be faster'}: {'; '.join(calls)}."


def call_facts(ratios: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """`each_call`, the log2 ratios and errors of single calls, and `slower_at`, those that are slower than tolerated.

    Two errors decide. A source is to be served at the others alone.
    """
    slower = [n for n, (ratio, error) in ratios.items() if ratio - 2.0 * error > _TOLERANCE]
    return {"each_call": dict(ratios), "slower_at": slower} if ratios else {}


def seconds_of_side(value: Mapping[str, Any], side: int) -> dict[str, float]:
    """A timing job's seconds of one side, by call or workload."""
    prefix = f"{side}:"
    return {n.removeprefix(prefix): s for n, s in value["seconds"].items() if n.startswith(prefix)}


def reasons_from_json(values: Sequence[Mapping[str, str]]) -> tuple[Reason, ...]:
    """Reasons from their JSON."""
    return tuple(Reason.from_json(r) for r in values)


def overall_judgement(reasons: Sequence[Reason]) -> Judgement:
    """The judgement of these findings together, as `SolutionVerdict.judgement` has it."""
    return SolutionVerdict("", "", tuple(reasons)).judgement


def reasons_text(reasons: Sequence[Reason]) -> str:
    """Reasons as sentences, without the number of the trial, which says how seeds were drawn."""
    return "; ".join(f"{r.code}: {r.detail}" for r in reasons)


def truncated_feedback(text: str) -> str:
    """Text of a length that a prompt can bear."""
    text = text.strip()
    most = _MOST_FEEDBACK_CHARACTERS
    return text if len(text) <= most else f"{text[: most - 4]} ..."
