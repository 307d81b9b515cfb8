"""Policies that ignore the risk: everything, or a fixed number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forecast_autotune.policy.state import TuningState
from forecast_autotune.records import Plan


@dataclass(frozen=True)
class Exhaustive:
    """Measure everything, the refused candidates too: an oracle must not depend on a forecast."""

    name: str = "exhaustive"

    def plan(self, state: TuningState) -> Plan:
        """All unmeasured candidates the budget allows, best forecast first."""
        left = [
            int(i) for i in state.forecasts.order() if state.forecasts.candidates[i] not in state.measured
        ]
        names = tuple(state.forecasts.candidates[i] for i in left[: state.remaining_measurements()])
        risk = 0.0 if not left else 1.0
        done = "budget reached before everything was measured" if left else "everything is measured"
        return Plan(names, "measure everything" if names else done, risk)


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
        wanted = [state.forecasts.candidates[int(i)] for i in order[: self.count]]
        left = [c for c in wanted if c not in state.measured][: state.remaining_measurements()]
        if not left and state.lacks_working_config():
            # All of the fixed choice failed: go on in the same order until something runs.
            rest = (state.forecasts.candidates[int(i)] for i in order)
            left = [c for c in rest if c not in state.measured][:1]
        return Plan(tuple(left), f"{self.name} {self.count}" if left else "the fixed choice is measured", 1.0)
