"""What a surrogate said while tables were replayed, and what was true: the evidence of a calibration."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forecast_autotune.policy import RiskBounded, State
from forecast_autotune.records import Candidate, Measurement, Plan
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.calibration import per_source
from forecast_autotune.surrogates.protocol import Array, Relative, Surrogate
from forecast_autotune.tuning.replay import replay_one

WITHIN = 0.05
"""The tolerance that P(within) is checked at."""
_SAMPLED = 1000
"""Of larger spaces, the single candidates' statements are checked on so many, evenly spread."""
_SHARE = 0.3
"""Replays go on to this share of the candidates, past where the default policy stops."""


@dataclass(frozen=True)
class Step:
    """One moment of one replay: uncalibrated statements, and the truth about each."""

    own: int
    """Measurements of this problem that ran ..."""
    each: int
    """... of each of its sources; see `calibration.per_source`."""
    new: int
    """Measurements of this problem, failures included."""
    risk: float
    """Share of joint draws in which an untried candidate beats the incumbent by the tolerance."""
    beaten: bool | None
    """Whether one does; None while nothing has run."""
    p_within: Array
    """Of each candidate not measured yet, [n]; of at most `_SAMPLED` of them."""
    within: Array
    """1.0 where it is within `WITHIN` of the best of all, else 0.0, [n]."""
    z: Array
    """(observed - mean) / sd of those of them that run, [m]."""
    group: str = ""
    """The group whose calibration the surrogate would go by; "" if it has none."""


class Watched(RiskBounded):
    """The default policy, noting what is stated and what is true at every step. Goes on past its limits."""

    @classmethod
    def knowing(cls, table: Table) -> Watched:
        """A policy that knows the truth, for one replay; `noted` fills as it goes."""
        made = cls(share=_SHARE)
        rows = table.by_candidate()
        truth = {c: math.log2(m.ms) for c, m in rows.items() if m.ok}
        object.__setattr__(made, "_truth", truth)
        object.__setattr__(made, "noted", {})
        return made

    noted: dict[int, Step]
    """By number of measurements: of several plans at one moment the last was made on all the IR."""
    _truth: dict[Candidate, float]

    def plan(self, state: State) -> Plan:
        """The plan of the default policy with a risk that is hardly ever accepted."""
        raw = replace(state, forecasts=state.forecasts.raw(), risk=0.005)
        plan = super().plan(raw)
        self.noted[state.new] = self._step(raw, plan)
        return plan

    def _step(self, state: State, plan: Plan) -> Step:
        best = min(self._truth.values())
        forecasts, names = state.forecasts, state.forecasts.candidates
        rows = np.array([i for i, c in enumerate(names) if c not in state.measured], dtype=np.intp)
        rows = rows[:: math.ceil(len(rows) / _SAMPLED) or 1]
        times = np.array([self._truth.get(names[int(i)], math.inf) for i in rows])
        ran = np.isfinite(times)
        near = math.log2(1 + state.tolerance) + 1e-9
        own = sum(m.ok for m in state.measured.values())
        return Step(
            own=own,
            each=per_source(own, names),
            new=state.new,
            risk=plan.risk,
            beaten=state.best() - best > near if math.isfinite(state.best()) else None,
            p_within=forecasts.p_within(WITHIN, seed=state.seed)[rows],
            within=(times <= best + math.log2(1 + WITHIN)).astype(float),
            z=(times[ran] - forecasts.mean[rows][ran]) / forecasts.sd[rows][ran],
            group=forecasts.group,
        )


def observe(
    table: Table,
    surrogate: Surrogate,
    *,
    seed: int = 0,
    relatives: Sequence[Relative] = (),
    settings: Settings | None = None,
) -> tuple[list[Step], list[Measurement]]:
    """The steps of one replay of a table, and what was measured. The surrogate sees nothing else of it.

    `settings` are the default ones unless given; `seed` takes the place of theirs.
    """
    policy = Watched.knowing(table)
    settings = (settings or Settings()).with_(seed=seed)
    with warnings.catch_warnings():
        # The tuner would go on without forecasts, and there would be nothing to calibrate.
        warnings.filterwarnings("error", "(surrogate .* failed|joint samples failed)")
        _, seen = replay_one(
            table, surrogate=surrogate, policy=policy, settings=settings, relatives=relatives
        )
    return list(policy.noted.values()), seen
