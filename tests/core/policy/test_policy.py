"""Plans: what is measured next, when it stops, budgets, audits, refusals."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from forecast_autotune.policy import (
    REFUSED,
    Exhaustive,
    Fixed,
    RiskBounded,
    TuningState,
    stated_risk,
    time_exhausted,
)
from forecast_autotune.records import Candidate, Config, Measurement, MeasuringCost, Outcome
from forecast_autotune.settings import Budget
from forecast_autotune.surrogates.protocol import Forecasts

NAMES = [Candidate(Config.of({"N": n})) for n in range(40)]


def ran(row: int, ms: float) -> tuple[Candidate, Measurement]:
    return NAMES[row], Measurement("p", NAMES[row], Outcome.OK, ms)


def failed(row: int, outcome: Outcome = Outcome.OUT_OF_RESOURCES) -> tuple[Candidate, Measurement]:
    return NAMES[row], Measurement("p", NAMES[row], outcome)


def forecasts(means: list[float], sd: float = 0.1, p_fail: float = 0.0) -> Forecasts:
    n = len(means)
    return Forecasts(NAMES[:n], np.array(means), np.full(n, sd), np.full(n, p_fail))


def rows_of(plan_members: tuple[Candidate, ...]) -> list[int]:
    return [NAMES.index(c) for c in plan_members]


def test_the_first_round_holds_the_best_forecasts() -> None:
    state = TuningState(forecasts([5.0, 1.0, 5.0, 1.1, 5.0, 5.0, 1.2, 5.0]), {})
    plan = RiskBounded().plan(state)
    assert sorted(rows_of(plan.measure)) == [1, 3, 6]
    assert plan.risk == 1.0


def test_it_stops_when_nothing_can_beat_the_incumbent() -> None:
    state = TuningState(
        forecasts([0.0, 0.1, 0.2, 3.0, 4.0]), dict([ran(0, 1.0), ran(1, 1.1), ran(2, 1.2)]), new=3
    )
    plan = RiskBounded().plan(state)
    assert plan.measure == ()
    assert plan.risk == 0.0
    assert "accepted" in plan.reason


def test_it_goes_on_while_one_may_be_better() -> None:
    known = dict([ran(0, 4.0), ran(1, 4.0), ran(2, 4.0)])
    plan = RiskBounded().plan(TuningState(forecasts([2.0, 2.0, 2.0, 2.5, 1.0]), known, new=3))
    assert rows_of(plan.measure) == [4]
    assert plan.risk > 0.9


def test_a_tolerance_wide_enough_ends_it() -> None:
    known = dict([ran(0, 1.0), ran(1, 1.0), ran(2, 1.0)])
    state = TuningState(forecasts([0.0, 0.0, 0.0, -0.2], sd=0.01), known, new=3)
    assert RiskBounded().plan(state).measure
    assert not RiskBounded().plan(replace(state, tolerance=0.3)).measure


def test_joint_samples_keep_copies_out_of_a_batch() -> None:
    """Row 1 is row 0 again; a batch of two spends its second place on row 2, which may win by itself."""

    def sampler(rows: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:  # type: ignore[type-arg]
        noise = generator.standard_normal((count, 3))
        noise[:, 1] = noise[:, 0]
        means = np.array([0.0, 0.0, 0.1])
        return np.asarray((means + noise)[:, rows])

    tied = Forecasts(NAMES[:3], np.array([0.0, 0.0, 0.1]), np.ones(3), np.zeros(3), sampler)
    plan = RiskBounded(least=2).plan(TuningState(tied, {}, budget=Budget(measurements=2)))
    assert sorted(rows_of(plan.measure)) in ([0, 2], [1, 2])


def test_certain_failures_are_refused_unless_nothing_else_is_left() -> None:
    made = forecasts([0.0, 1.0, 2.0, 3.0])
    made.p_fail[0] = REFUSED
    state = TuningState(made, {})
    assert 0 not in rows_of(RiskBounded().plan(state).measure)
    known = dict([failed(1), failed(2), failed(3)])
    assert rows_of(RiskBounded().plan(replace(state, measured=known, new=3)).measure) == [0]
    known = dict([ran(1, 1.0), failed(2), failed(3)])
    assert RiskBounded().plan(replace(state, measured=known, new=3)).measure == ()
    assert rows_of(Exhaustive().plan(state).measure)[-1] == 0, "an oracle measures refused ones too, last"


def test_the_share_caps_a_decision_and_failures_do_not() -> None:
    n = 40
    made = forecasts([0.0] * n, sd=1.0)
    measured = dict(ran(i, 1.0) for i in range(12))
    plan = RiskBounded().plan(TuningState(made, measured, new=12))
    assert plan.measure == ()
    assert "budget" in plan.reason
    measured = dict(failed(i) for i in range(12))
    assert RiskBounded().plan(TuningState(made, measured, new=12)).measure


def test_rounds_are_narrow_after_the_first_look() -> None:
    made = forecasts([0.0] * 40, sd=1.0)
    sizes, new = [], 0
    while True:
        state = TuningState(made, dict(ran(i, 1.0) for i in range(new)), new=new, risk=-1.0)
        if not (found := RiskBounded().plan(state).measure):
            break
        sizes.append(len(found))
        new += len(found)
    assert sizes == [3, 1, 1, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("budget", [Budget(measurements=5), Budget(seconds=3.0), Budget(gpu_seconds=2.0)])
def test_a_budget_ends_every_policy(budget: Budget) -> None:
    measured = dict(ran(i, 1.0) for i in range(5))
    spent = MeasuringCost(timing_s=2.0, wall_s=3.0)
    state = TuningState(forecasts([-3.0] * 40), measured, new=5, budget=budget, spent=spent)
    for policy in (RiskBounded(), Exhaustive(), Fixed(9), Fixed(9, random=True)):
        assert policy.plan(state).measure == (), policy.name
    assert "budget" in Exhaustive().plan(state).reason


def test_seconds_below_the_budget_are_not_the_end() -> None:
    assert not time_exhausted(Budget(seconds=3.0, gpu_seconds=2.0), MeasuringCost(timing_s=1.9, wall_s=2.9))
    assert time_exhausted(Budget(seconds=3.0), MeasuringCost(wall_s=3.0))
    assert time_exhausted(Budget(gpu_seconds=2.0), MeasuringCost(timing_s=2.0))


def test_stated_risk_is_the_share_of_draws_below_the_bar() -> None:
    state = TuningState(forecasts([0.0, 0.0]), dict([ran(0, 1.0)]), tolerance=0.0)
    samples = np.array([[-0.1], [0.1], [math.inf], [-1.0]])
    assert stated_risk(state, np.array([1]), samples) == 0.5
    assert stated_risk(state, np.array([], dtype=np.intp), np.zeros((1, 0))) == 0.0
    assert stated_risk(replace(state, measured={}), np.array([1]), samples) == 1.0


def audit_of(state: TuningState) -> tuple[Candidate, ...]:
    plan = RiskBounded().plan(state)
    assert plan.audit == plan.measure
    assert plan.audit_probability == (state.audit if plan.audit else 0.0)
    return plan.audit


def test_audits_are_drawn_once_a_decision_is_made_and_within_the_budget() -> None:
    known = dict([ran(0, 1.0), ran(1, 1.1), ran(2, 1.2)])
    state = TuningState(forecasts([0.0] * 3 + [5.0] * 37), known, new=3, audit=0.5, problem="a")
    drawn = audit_of(state)
    assert 5 < len(drawn) < 32
    assert not set(drawn) & set(known)
    assert audit_of(replace(state, audited=True)) == ()
    assert len(audit_of(replace(state, budget=Budget(measurements=5)))) == 2
    assert audit_of(replace(state, audit=1.0)) == tuple(NAMES[3:])


def test_audits_differ_between_problems_and_keep_their_probability() -> None:
    """Drawn by problem: otherwise the same configs of a kernel would be audited at every shape."""
    known = dict([ran(0, 1.0), ran(1, 1.1), ran(2, 1.2)])
    state = TuningState(forecasts([0.0] * 3 + [5.0] * 7), known, new=3, audit=0.3)
    counted: Counter[Candidate] = Counter()
    for number in range(400):
        counted.update(audit_of(replace(state, problem=f"problem {number}")))
    for name in NAMES[3:10]:
        assert 75 < counted[name] < 165, "0.3 of 400 is 120; 45 is five standard deviations"


def test_fixed_baselines_take_their_count() -> None:
    state = TuningState(forecasts([0.0] * 20), {})
    assert rows_of(Fixed(4).plan(state).measure) == [0, 1, 2, 3]
    drawn = rows_of(Fixed(4, random=True).plan(state).measure)
    assert len(set(drawn)) == 4
    assert drawn != rows_of(Fixed(4, random=True).plan(replace(state, seed=1)).measure)
    known = dict(ran(i, 1.0) for i in range(3))
    assert rows_of(Fixed(4).plan(replace(state, measured=known, new=3)).measure) == [3]


def test_a_huge_space_is_planned_from_its_promising_part() -> None:
    n = 3000
    names = [Candidate(Config.of({"N": i})) for i in range(n)]
    mean = np.linspace(10.0, 0.0, n)
    asked: list[int] = []

    def sampler(rows: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:  # type: ignore[type-arg]
        asked.append(len(rows))
        return np.asarray(mean[rows] + 0.1 * generator.standard_normal((count, len(rows))))

    wide = Forecasts(names, mean, np.full(n, 0.1), np.zeros(n), sampler)
    plan = RiskBounded().plan(TuningState(wide, {}))
    assert asked == [RiskBounded().considered], "joint draws grow with the square of the rows"
    assert names[-1] in plan.measure


@pytest.mark.parametrize("incumbent", [None, 0.4, 3.0])
def test_a_round_takes_whatever_improves_most_on_what_it_has_already(incumbent: float | None) -> None:
    policy, n = RiskBounded(first=1.0, least=1), len(NAMES) - 1
    wide = forecasts(list(np.linspace(0.0, 1.5, n + 1)), sd=0.7, p_fail=0.2)
    known = {} if incumbent is None else dict([ran(n, 2.0**incumbent)])
    state = TuningState(wide, known, new=len(known), risk=-1.0, ready=(NAMES[7], NAMES[30]))
    chosen = rows_of(policy.plan(state).measure)
    rows, samples = policy._promising(state)
    assert len(samples) == (policy.draws if known else policy.glance)
    cheap = np.array([policy.cheap if i in (7, 30) else 1.0 for i in rows])
    usual = np.where(np.isfinite(samples), samples, samples[np.isfinite(samples)].max())
    bar = np.median(usual, axis=1) if incumbent is None else np.full(len(samples), incumbent)
    for i in chosen:
        gain = cheap * np.maximum(0.0, bar[:, None] - samples).mean(axis=0)
        assert gain[list(rows).index(i)] == pytest.approx(gain.max())
        bar = np.minimum(bar, samples[:, list(rows).index(i)])
    assert len(set(chosen)) == len(chosen) > 4


def test_rounds_of_a_long_list_leave_no_core_idle() -> None:
    policy = RiskBounded()
    names = [Candidate(Config.of({"N": n})) for n in range(1000)]
    means = np.linspace(0.0, 1.0, len(names))
    long = Forecasts(names, means, np.full(len(names), 0.5), np.zeros(len(names)))
    known = {names[i]: Measurement("p", names[i], Outcome.OK, 1.0) for i in range(3)}
    state = TuningState(long, known, new=3)
    most = policy.of(2 * policy.first, len(names))
    few = len(policy.plan(replace(state, workers=1)).measure)
    assert few == policy.of(policy.first / 2, len(names)) < most
    assert len(policy.plan(replace(state, workers=most)).measure) == most
    assert len(policy.plan(replace(state, workers=8 * most)).measure) == most, "more would be waste"
