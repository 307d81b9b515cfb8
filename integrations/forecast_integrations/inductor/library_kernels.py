"""The library's kernels of an operation: they need no compilation, and say what is to be beaten."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from forecast_autotune.policy import Policy
from forecast_autotune.records import Candidate, Decision, Measurement, Plan
from forecast_integrations.inductor.session import FewRoundsPolicy

TRUSTED = "no other choice is likely to be faster than the library's kernel"
"""Reason of a decision without a measurement of any other choice."""


class LibraryKernels:
    """Those of one operation, in the order given."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = list(candidates)
        self.time: Callable[[], Sequence[Measurement]] | None = None
        """Times them before anything else is chosen, where that can be done."""
        self.ahead: dict[Candidate, Measurement] = {}
        """What it said. They are timed again beside other choices: what is decided must be timed alike."""
        self.epilogue_ms = math.inf
        """What a choice would save that also computes what follows; inf where that is not known."""

    def trusted(
        self, policy: Policy, plan: Plan, risk: float, measured: Mapping[Candidate, Measurement]
    ) -> Candidate | None:
        """The fastest, if nothing is likely to be faster, alone or with what follows, and nothing else was timed.

        `plan` is the first one that knows their times, `risk` what is accepted.
        """
        known = {c: m for c, m in {**self.ahead, **measured}.items() if m.ok}
        if not known or not isinstance(policy, FewRoundsPolicy) or not known.keys() <= set(self.candidates):
            return None
        best = min((c for c in self.candidates if c in known), key=lambda c: known[c].ms)
        return best if policy.trusts_library(plan, risk, known[best].ms, self.epilogue_ms) else None

    def overrules(self, decision: Decision, policy: Policy) -> bool:
        """Whether a decision without other measurements does not hold here, as a choice may save what follows."""
        if decision.reason != TRUSTED or not isinstance(policy, FewRoundsPolicy):
            return False
        return not policy.is_short(self.epilogue_ms, decision.median_ms or 0.0)
