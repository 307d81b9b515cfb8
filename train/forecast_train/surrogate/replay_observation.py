"""What a surrogate said while tables were replayed, and what was true: the evidence of a calibration."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forecast_autotune.policy import RiskBounded, TuningState
from forecast_autotune.records import Candidate, Measurement, Plan
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.calibration import measurements_per_source
from forecast_autotune.surrogates.protocol import Array, Relative, Surrogate
from forecast_autotune.tuning.replays.replay import replay_one

WITHIN_TOLERANCE = 0.05
"""The tolerance that P(within) is checked at."""
_MOST_CHECKED = 1000
"""Of larger spaces, the single candidates' statements are checked on so many, evenly spread."""
_REPLAYED_SHARE = 0.3
"""Replays go on to this share of the candidates, past where the default policy stops."""


@dataclass(frozen=True)
class ReplayStep:
    """One moment of one replay: uncalibrated statements, and the truth about each."""

    own: int
    """Measurements of this problem that ran."""
    each: int
    """Measurements that ran of each of its sources; see `calibration.measurements_per_source`."""
    new: int
    """Measurements of this problem, failures included."""
    risk: float
    """Share of joint draws in which an untried candidate beats the incumbent by the tolerance."""
    beaten: bool | None
    """Whether one does; None while nothing has run."""
    p_within: Array
    """Of each candidate not measured yet, [n]; of at most `_MOST_CHECKED` of them."""
    within: Array
    """1.0 where it is within `WITHIN_TOLERANCE` of the best of all, else 0.0, [n]."""
    z: Array
    """(observed - mean) / sd of those of them that run, [m]."""
    group: str = ""
    """The group whose calibration the surrogate would go by; "" if it has none."""


class ObservedPolicy(RiskBounded):
    """The default policy, noting what is stated and what is true at every step. Goes on past its limits."""

    @classmethod
    def for_table(cls, table: Table) -> ObservedPolicy:
        """A policy that knows the truth, for one replay; `steps` fills as it goes."""
        made = cls(share=_REPLAYED_SHARE)
        rows = table.by_candidate()
        truth = {c: math.log2(m.ms) for c, m in rows.items() if m.ok}
        object.__setattr__(made, "_truth", truth)
        object.__setattr__(made, "steps", {})
        return made

    steps: dict[int, ReplayStep]
    """By number of measurements: of several plans at one moment the last was made on all the IR."""
    _truth: dict[Candidate, float]

    def plan(self, state: TuningState) -> Plan:
        """The plan of the default policy with a risk that is hardly ever accepted."""
        raw = replace(state, forecasts=state.forecasts.uncalibrated(), risk=0.005)
        plan = super().plan(raw)
        self.steps[state.new] = self._step(raw, plan)
        return plan

    def _step(self, state: TuningState, plan: Plan) -> ReplayStep:
        best = min(self._truth.values())
        forecasts, names = state.forecasts, state.forecasts.candidates
        rows = np.array([i for i, c in enumerate(names) if c not in state.measured], dtype=np.intp)
        rows = rows[:: math.ceil(len(rows) / _MOST_CHECKED) or 1]
        times = np.array([self._truth.get(names[int(i)], math.inf) for i in rows])
        ran = np.isfinite(times)
        near = math.log2(1 + state.tolerance) + 1e-9
        own = sum(m.ok for m in state.measured.values())
        return ReplayStep(
            own=own,
            each=measurements_per_source(own, names),
            new=state.new,
            risk=plan.risk,
            beaten=state.best() - best > near if math.isfinite(state.best()) else None,
            p_within=forecasts.p_within(WITHIN_TOLERANCE, seed=state.seed)[rows],
            within=(times <= best + math.log2(1 + WITHIN_TOLERANCE)).astype(float),
            z=(times[ran] - forecasts.mean[rows][ran]) / forecasts.sd[rows][ran],
            group=forecasts.group,
        )


def observe_replay(
    table: Table,
    surrogate: Surrogate,
    *,
    seed: int = 0,
    relatives: Sequence[Relative] = (),
    settings: Settings | None = None,
) -> tuple[list[ReplayStep], list[Measurement]]:
    """The steps of one replay of a table, and what was measured. The surrogate sees nothing else of it.

    `settings` are the default ones unless given; `seed` takes the place of theirs.
    """
    policy = ObservedPolicy.for_table(table)
    settings = (settings or Settings()).with_(seed=seed)
    with warnings.catch_warnings():
        # The tuner would go on without forecasts, and there would be nothing to calibrate.
        warnings.filterwarnings("error", "(surrogate .* failed|joint samples failed)")
        _, seen = replay_one(
            table, surrogate=surrogate, policy=policy, settings=settings, relatives=relatives
        )
    return list(policy.steps.values()), seen
