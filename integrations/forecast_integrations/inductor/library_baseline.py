"""The library's kernels of an operation: they need no compilation, and say what is to be beaten."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from forecast_autotune.policy import Policy
from forecast_autotune.records import Candidate, Decision, Measurement, Plan
from forecast_integrations.inductor.choices.graph_position import GraphPosition
from forecast_integrations.inductor.session import LIBRARY_BEST_RISK, FewRoundsPolicy

TRUSTED = "no other choice is likely to be faster than the library's kernel"
SMALL = "the operation is too small a part of its graph for a compilation"
"""Reasons of decisions without a measurement of any other choice."""


class LibraryBaseline:
    """Those of one operation, in the order given."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = list(candidates)
        self.time: Callable[[], Sequence[Measurement]] | None = None
        """Times them before anything else is chosen, where that can be done."""
        self.ahead: dict[Candidate, Measurement] = {}
        """What it said. They are timed again beside other choices: what is decided must be timed alike."""
        self.position = GraphPosition()

    def sufficient(
        self, policy: Policy, first: Plan, risk: float, measured: Mapping[Candidate, Measurement]
    ) -> tuple[Candidate, Plan] | None:
        """The fastest, and the first plan with the reason, where it is taken before anything else is timed.

        `first` knows their times, `risk` is what is accepted.
        """
        known = {c: m for c, m in {**self.ahead, **measured}.items() if m.ok}
        if not known or not isinstance(policy, FewRoundsPolicy) or not known.keys() <= set(self.candidates):
            return None
        best = min((c for c in self.candidates if c in known), key=lambda c: known[c].ms)
        if policy.trusts_library(first, risk, known[best].ms, self.position):
            return best, replace(first, reason=TRUSTED, risk=LIBRARY_BEST_RISK)
        if policy.is_small(known[best].ms, self.position):
            return best, replace(first, reason=SMALL)
        return None

    def is_worth_waiting(self, policy: Policy, plan: Plan, measured: Mapping[Candidate, Measurement]) -> bool:
        """Whether a further round may gain what it is waited for, by the operation's part in its graph."""
        best_ms = min((m.ms for m in measured.values() if m.ok), default=None)
        if best_ms is None or not isinstance(policy, FewRoundsPolicy):
            return True
        return policy.is_worth_waiting(plan, best_ms, self.position)

    def overrules(self, decision: Decision, policy: Policy) -> bool:
        """Whether a decision without other measurements, made elsewhere in a graph, does not hold here."""
        if decision.reason not in (TRUSTED, SMALL) or not isinstance(policy, FewRoundsPolicy):
            return False
        ms, holds = decision.median_ms or 0.0, Plan((), decision.reason, 0.0)
        if decision.reason == SMALL:
            return not policy.is_small(ms, self.position)
        return not policy.trusts_library(holds, 1.0, ms, self.position)
