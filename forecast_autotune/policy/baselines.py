"""Policies that ignore the risk: everything, a fixed number, or the candidates that another policy refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from forecast_autotune.policy.state import Policy, TuningState
from forecast_autotune.records import Plan


@dataclass(frozen=True)
class Exhaustive:
    """Measure everything, the refused candidates too: an oracle must not depend on a forecast."""

    name: str = "exhaustive"

    def plan(self, state: TuningState) -> Plan:
        """All unmeasured candidates the budget allows, best forecast first."""
        rows = [
            int(i) for i in state.forecasts.order() if state.forecasts.candidates[i] not in state.measured
        ]
        names = tuple(state.forecasts.candidates[i] for i in rows[: state.remaining_measurements()])
        risk = 0.0 if not rows else 1.0
        reason = "budget reached before everything was measured" if rows else "everything is measured"
        return Plan(names, "measure everything" if names else reason, risk)


@dataclass(frozen=True)
class Fixed:
    """A baseline that ignores the forecasts: `count` candidates at random or in the user's order."""

    count: int
    random: bool = False

    @property
    def name(self) -> str:
        """`random` or `first`."""
        return "random" if self.random else "first"

    def plan(self, state: TuningState) -> Plan:
        """All of them in one round."""
        total = len(state.forecasts)
        order = np.random.default_rng(state.seed).permutation(total) if self.random else np.arange(total)
        choice = [state.forecasts.candidates[int(i)] for i in order[: self.count]]
        names = [c for c in choice if c not in state.measured][: state.remaining_measurements()]
        if not names and state.lacks_working_config():
            # All of the fixed choice failed: go on in the same order until something runs.
            remainder = (state.forecasts.candidates[int(i)] for i in order)
            names = [c for c in remainder if c not in state.measured][:1]
        reason = f"{self.name} {self.count}" if names else "the fixed choice is measured"
        return Plan(tuple(names), reason, 1.0)


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
        rows = state.refused()[: state.remaining_measurements()]
        candidates = tuple(state.forecasts.candidates[int(i)] for i in rows)
        if not candidates:
            return plan
        return replace(plan, measure=candidates, reason="the tuner's hooks hear of candidates that fail, too")
