"""The state of a decision (`TuningState`), its `Policy`, and the risk that it states."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.candidate_list import CandidateList, Codes
from forecast_autotune.records import Candidate, Measurement, MeasuringCost, Outcome, Plan
from forecast_autotune.settings import Budget
from forecast_autotune.surrogates.protocol import Array, Forecasts

REFUSED = 0.9
"""A candidate whose probability of failing is at least this is refused before compiling."""


@dataclass(frozen=True)
class TuningState:
    """All a policy may look at."""

    forecasts: Forecasts
    measured: Mapping[Candidate, Measurement]
    """Labels known of this problem's candidates, stored ones included."""
    new: int = 0
    """How many were measured for this decision."""
    round: int = 0
    workers: int = 1
    tolerance: float = 0.02
    risk: float = 0.10
    budget: Budget = Budget()
    spent: MeasuringCost = MeasuringCost()
    audit: float = 0.0
    audited: bool = False
    """Whether the audit of this decision has been drawn."""
    seed: int = 0
    ready: Collection[Candidate] = ()
    """Candidates that are compiled and not timed: measuring them costs little."""
    compiling: Collection[Candidate] = ()
    """Candidates that compile now."""
    compile_s: Array | None = None
    """Expected seconds until each candidate is compiled if its worker starts, or goes on, now: [n], 0 for ready
    candidates. None where nothing is known of compilations."""
    slowdown: Array | None = None
    """log2 by which candidates are expected to run slower than forecast, as their compilation shows: [n]."""
    programs: Codes | None = None
    """A number per candidate, equal for those that compile to the same program: [n]. None where that is unknown."""
    problem: str = ""
    """The problem's id: two problems with equally many candidates must not draw the same audits."""

    def best(self) -> float:
        """log2(milliseconds) of the incumbent; +inf when nothing has run."""
        return min((math.log2(m.ms) for m in self.measured.values() if m.ok), default=math.inf)

    def pending(self) -> npt.NDArray[np.intp]:
        """Rows to measure, one for each program.

        Refused ones are among them where nothing else is left and nothing has run, or their risk is too high.
        """
        unknown = ~CandidateList.of(self.forecasts.candidates).mask_of(self.measured)
        fit = unknown & (self.forecasts.p_fail < REFUSED)
        if not fit.any() and (math.isinf(self.best()) or self.risk_of_refusals() > self.risk):
            return np.flatnonzero(unknown)
        return self._one_of_each_program(np.flatnonzero(fit))

    def refused(self) -> npt.NDArray[np.intp]:
        """Rows that are not tried, as they are expected to fail: a forecast, not a measurement."""
        unknown = ~CandidateList.of(self.forecasts.candidates).mask_of(self.measured)
        return np.flatnonzero(unknown & (self.forecasts.p_fail >= REFUSED))

    def risk_of_refusals(self) -> float:
        """P(some refused candidate runs, and beats the incumbent by more than the tolerance).

        The likeliest of them counts: all are refused for one reason, which is wrong for all or for none.
        """
        rows, forecasts = self.refused(), self.forecasts
        bar = self.best() - math.log2(1 + self.tolerance)
        away = (bar - forecasts.mean[rows]) / np.maximum(forecasts.sd[rows], 1e-3)
        faster = 1.0 / (1.0 + np.exp(-1.702 * np.clip(away, -30.0, 30.0)))  # a normal's, within a hundredth
        return float(((1.0 - forecasts.p_fail[rows]) * faster).max(initial=0.0))

    def _one_of_each_program(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """One of the rows that share a program: the first whose compilation has begun, else the first row.

        The first to end its compilation would be chance. None where the program was measured.
        """
        if self.programs is None or not len(rows):
            return rows
        names = CandidateList.of(self.forecasts.candidates)
        candidates = [m.candidate for m in self.measured.values() if m.outcome is not Outcome.INFRASTRUCTURE]
        programs = self.programs[[names.row_of[c] for c in candidates if c in names.row_of]]
        rows = rows[~np.isin(self.programs[rows], programs)]
        is_begun = [names[i] in self.compiling or names[i] in self.ready for i in rows.tolist()]
        order = rows[np.argsort(np.logical_not(is_begun), kind="stable")]
        firsts: npt.NDArray[np.intp] = np.sort(order[np.unique(self.programs[order], return_index=True)[1]])
        return firsts

    def lacks_working_config(self) -> bool:
        """Every candidate tried so far failed by its own fault: no limit may end the decision here.

        A launch needs a config that works, so until there is one, candidates are tried one by one as
        Triton would. Faults of the harness end that: more of them would follow.
        """
        faults = any(m.outcome is Outcome.INFRASTRUCTURE for m in self.measured.values())
        return math.isinf(self.best()) and not faults

    def remaining_measurements(self) -> int:
        """How many more candidates the budget allows (all when there is no limit, one when stuck)."""
        least = int(self.lacks_working_config())
        if time_exhausted(self.budget, self.spent):
            return least
        limit = self.budget.measurements
        return len(self.forecasts) if limit is None else max(least, limit - self.new)


def time_exhausted(budget: Budget, spent: MeasuringCost) -> bool:
    """Whether the seconds of a budget are used up."""
    return (budget.seconds is not None and spent.wall_s >= budget.seconds) or (
        budget.gpu_seconds is not None and spent.timing_s >= budget.gpu_seconds
    )


class Policy(Protocol):
    """Decides what to measure next. A pure function of the state: same state, same plan."""

    @property
    def name(self) -> str:
        """Short name, for reports."""
        ...

    def plan(self, state: TuningState) -> Plan:
        """Return the next measurements; an empty `measure` ends the decision."""
        ...


def stated_risk(state: TuningState, rows: npt.NDArray[np.intp], samples: Array) -> float:
    """P(some candidate of `rows`, or a refused one, is faster than the incumbent by more than the tolerance).

    `samples` [k, len(rows)] are joint draws of log2(milliseconds), +inf where the draw failed. The
    share of draws is weighed by the surrogate and then calibrated. 1.0 while nothing has been measured.
    """
    best = state.best()
    if math.isinf(best):
        return 1.0
    least = state.risk_of_refusals()
    if not len(rows):
        return least
    share = float((samples.min(axis=1) < best - math.log2(1 + state.tolerance)).mean())
    return max(least, state.forecasts.calibrate_risk(state.forecasts.weigh_risk(share)))
