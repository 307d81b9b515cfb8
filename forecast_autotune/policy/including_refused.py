"""Trying what a policy refuses, for whoever listens to failures."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.policy.state import REFUSED, Policy, TuningState
from forecast_autotune.records import Plan


@dataclass(frozen=True)
class IncludingRefused:
    """A policy that, after its base is satisfied, tries the candidates that are refused as sure to fail.

    `triton.autotune` tries them, too, and calls the user's hooks with their exceptions.
    """

    base: Policy

    @property
    def name(self) -> str:
        """As the base's."""
        return self.base.name

    def plan(self, state: TuningState) -> Plan:
        """The base's plan; when that is empty, everything refused and not tried, within the budget."""
        plan = self.base.plan(state)
        if plan.measure:
            return plan
        candidates = state.forecasts.candidates
        untried = ~CandidateList.of(candidates).mask_of(state.measured)
        rows = (untried & (state.forecasts.p_fail >= REFUSED)).nonzero()[0]
        refused = tuple(candidates[int(i)] for i in rows[: state.remaining_measurements()])
        if not refused:
            return plan
        return replace(plan, measure=refused, reason="the tuner's hooks hear of candidates that fail, too")
