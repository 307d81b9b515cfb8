"""The one-line summary of a decision, and the tally of a language model's part in several."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from forecast_autotune.printable import LONGEST_NAME, count_text, printable
from forecast_autotune.records import Decision, LLMConsultation

_MAX_SHOWN_REASONS = 3


def summary_line(kernel: str, decision: Decision) -> str:
    """Candidates, forecast, measured, trusted, time spent and saved, choice and risk in one line."""
    time_text = "" if decision.median_ms is None else f" {decision.median_ms:.4g} ms"
    counts = f"{decision.candidates} candidates"
    if decision.measured or decision.evidence == "forecast":
        counts += f", all forecast, {decision.measured} measured, {decision.trusted} trusted"
        counts += f", {decision.refused} refused" if decision.refused else ""
        cost_text = f"; {decision.cost.wall_s:.2f} s spent"
        cost_text += f", about {decision.saved_s:.0f} s saved" if decision.saved_s >= 1 else ""
    else:
        cost_text = "; nothing timed"
    if decision.llm is not None:
        cost_text += f"; {consultation_text(decision.llm)}"
    return printable(
        f"forecast_autotune {kernel}: {counts}{cost_text}; chose {decision.chosen}{time_text} "
        f"[{decision.evidence}; {decision.stated_risk:.0%} risk of > {decision.tolerance:.0%} regret]"
    )


def consultation_text(part: LLMConsultation) -> str:
    """A model's part in one decision: asked or not and why, what it moved, its weight and seconds."""
    if not part.asked:
        return f"language model {part.model} not asked: {part.why}"
    effect = part.effect or "moved nothing in the plan"
    if part.trouble:
        effect = part.trouble + (f"; {part.effect}" if part.effect else "")
    why = f" ({part.why})" if part.why else ""
    return f"language model {part.model} asked{why}: {effect}, weight {part.weight:.2f}, {part.seconds:.1f} s"


@dataclass
class ModelTally:
    """The sum of language models' parts in the decisions that were added."""

    decisions: int = 0
    """Decisions whose settings name a model."""
    asked: int = 0
    moved_in: int = 0
    moved_out: int = 0
    seconds: float = 0.0
    unasked: Counter[str] = field(default_factory=Counter)
    """Why not, with the number of decisions."""
    unheard: Counter[str] = field(default_factory=Counter)
    """Why an answer did not count, with the number of decisions."""

    def add(self, part: LLMConsultation | None) -> None:
        """Count one decision; None is one without a model."""
        if part is None:
            return
        self.decisions += 1
        self.asked += part.asked
        self.moved_in += part.moved_in
        self.moved_out += part.moved_out
        self.seconds += part.seconds
        if not part.asked:
            self.unasked[part.why] += 1
        elif part.trouble:
            self.unheard[part.trouble] += 1

    def merge(self, other: ModelTally) -> None:
        """Add another tally's counts."""
        for name in ("decisions", "asked", "moved_in", "moved_out", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.unasked.update(other.unasked)
        self.unheard.update(other.unheard)

    def line(self) -> str:
        """One line for a person; empty where no model was named."""
        if not self.decisions:
            return ""
        decisions = f"{self.asked} of {count_text(self.decisions, 'decision')}"
        candidates = count_text(self.moved_in, "candidate")
        text = f"language model: asked in {decisions}, moved {candidates} into and {self.moved_out} out of the plans, "
        text += f"{self.seconds:.1f} s"
        for name, reasons in (("not heard", self.unheard), ("not asked", self.unasked)):
            if reasons:
                texts = [
                    f"{printable(why, LONGEST_NAME)} ({n}x)" if n > 1 else printable(why, LONGEST_NAME)
                    for why, n in reasons.most_common(_MAX_SHOWN_REASONS)
                ]
                more = len(reasons) - len(texts)
                text += f"; {name}: {', '.join(texts)}" + (f" and {more} other reasons" if more else "")
        return text

    def to_json(self) -> dict[str, object]:
        """All counts; keys are stable."""
        sums = dict(vars(self))
        reasons = {"not_asked": dict(sums.pop("unasked")), "not_heard": dict(sums.pop("unheard"))}
        return sums | reasons
