"""Plans: what is measured next, when it stops, budgets, audits, refusals."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forecast_autotune.policy import (
    REFUSED,
    Exhaustive,
    Fixed,
    RiskBounded,
    TuningState,
    WallTime,
    stated_risk,
    time_exhausted,
)
from forecast_autotune.records import Candidate, Config, Measurement, MeasuringCost, Outcome, Plan
from forecast_autotune.settings import Budget
from forecast_autotune.surrogates.protocol import Forecasts

NAMES = [Candidate(Config.of({"N": n})) for n in range(40)]


def ran(times: Mapping[int, float]) -> dict[Candidate, Measurement]:
    return {NAMES[row]: Measurement("p", NAMES[row], Outcome.OK, ms) for row, ms in times.items()}


def failed(*numbers: int, outcome: Outcome = Outcome.OUT_OF_RESOURCES) -> dict[Candidate, Measurement]:
    return {NAMES[row]: Measurement("p", NAMES[row], outcome) for row in numbers}


def forecasts(means: Sequence[float], sd: float = 0.1) -> Forecasts:
    n = len(means)
    return Forecasts(NAMES[:n], np.array(means), np.full(n, sd), np.zeros(n))


def rows(plan: Plan) -> list[int]:
    return [NAMES.index(c) for c in plan.measure]


def test_the_first_round_holds_the_best_forecasts() -> None:
    state = TuningState(forecasts([5.0, 1.0, 5.0, 1.1, 5.0, 5.0, 1.2, 5.0]), {})
    plan = RiskBounded().plan(state)
    assert sorted(rows(plan)) == [1, 3, 6]
    assert plan.risk == 1.0


def test_it_stops_when_nothing_can_beat_the_incumbent() -> None:
    state = TuningState(forecasts([0.0, 0.1, 0.2, 3.0, 4.0]), ran({0: 1.0, 1: 1.1, 2: 1.2}), new=3)
    plan = RiskBounded().plan(state)
    assert plan.measure == ()
    assert plan.risk == 0.0
    assert "accepted" in plan.reason


def test_it_goes_on_while_one_may_be_better() -> None:
    known = ran({0: 4.0, 1: 4.0, 2: 4.0})
    plan = RiskBounded().plan(TuningState(forecasts([2.0, 2.0, 2.0, 2.5, 1.0]), known, new=3))
    assert rows(plan) == [4]
    assert plan.risk > 0.9


def test_a_tolerance_wide_enough_ends_it() -> None:
    known = ran({0: 1.0, 1: 1.0, 2: 1.0})
    state = TuningState(forecasts([0.0, 0.0, 0.0, -0.2], sd=0.01), known, new=3)
    assert RiskBounded().plan(state).measure
    assert not RiskBounded().plan(replace(state, tolerance=0.3)).measure


def test_certain_failures_are_refused_unless_nothing_else_is_left() -> None:
    made = forecasts([0.0, 1.0, 2.0, 3.0])
    made.p_fail[0] = REFUSED
    state = TuningState(made, {})
    assert 0 not in rows(RiskBounded().plan(state))
    known = failed(1, 2, 3)
    assert rows(RiskBounded().plan(replace(state, measured=known, new=3))) == [0]
    known = ran({1: 1.0}) | failed(2, 3)
    assert RiskBounded().plan(replace(state, measured=known, new=3)).measure == ()
    assert rows(Exhaustive().plan(state))[-1] == 0, "an oracle measures refused ones too, last"


def test_the_share_caps_a_decision_and_failures_do_not() -> None:
    n = 40
    made = forecasts([0.0] * n, sd=1.0)
    measured = ran(dict.fromkeys(range(12), 1.0))
    plan = RiskBounded().plan(TuningState(made, measured, new=12))
    assert plan.measure == ()
    said = r"default limit of 12 measurements \(budget=.*\) reached with \d+% risk left, 10% accepted"
    assert re.fullmatch(said, plan.reason)
    bent = TuningState(made, measured, new=12, risk=0.05)
    assert RiskBounded().cap(bent) == 24, "half the risk, twice the limit"
    assert RiskBounded().plan(bent).measure
    assert (
        RiskBounded().plan(replace(bent, budget=Budget(measurements=12))).reason.startswith("budget reached")
    )
    measured = failed(*range(12))
    assert RiskBounded().plan(TuningState(made, measured, new=12)).measure


def test_seconds_below_the_budget_are_not_the_end() -> None:
    assert not time_exhausted(Budget(seconds=3.0, gpu_seconds=2.0), MeasuringCost(timing_s=1.9, wall_s=2.9))
    assert time_exhausted(Budget(seconds=3.0), MeasuringCost(wall_s=3.0))
    assert time_exhausted(Budget(gpu_seconds=2.0), MeasuringCost(timing_s=2.0))


def test_stated_risk_is_the_share_of_draws_below_the_bar() -> None:
    state = TuningState(forecasts([0.0, 0.0]), ran({0: 1.0}), tolerance=0.0)
    samples = np.array([[-0.1], [0.1], [math.inf], [-1.0]])
    assert stated_risk(state, np.array([1]), samples) == 0.5
    assert stated_risk(state, np.array([], dtype=np.intp), np.zeros((1, 0))) == 0.0
    assert stated_risk(replace(state, measured={}), np.array([1]), samples) == 1.0


def test_a_refusal_that_nothing_proves_leaves_a_risk() -> None:
    """Row 0 ran; the faster row 1 is refused, row 2 is slower for sure."""
    made = replace(forecasts([0.0, -2.0, 9.0], sd=0.1), p_fail=np.array([0.0, 0.95, 0.95]))
    state = TuningState(made, ran({0: 1.0}), new=1)
    plan = RiskBounded().plan(state)
    assert (plan.measure, plan.risk) == ((), pytest.approx(0.05, rel=0.01))
    assert plan.reason == "every candidate is measured but 2 that are expected to fail"
    assert RiskBounded().plan(replace(state, risk=0.01)).measure[0] == NAMES[1], (
        "who accepts less has it tried"
    )
    slower = replace(made, mean=np.array([0.0, 9.0, 9.0]))
    assert (
        0
        < stated_risk(replace(state, forecasts=slower), np.array([], dtype=np.intp), np.zeros((1, 0)))
        < 1e-6
    )


def audit_of(state: TuningState) -> tuple[Candidate, ...]:
    plan = RiskBounded().plan(state)
    assert plan.audit == plan.measure
    assert plan.audit_probability == (state.audit if plan.audit else 0.0)
    return plan.audit


def test_audits_are_drawn_once_a_decision_is_made_and_within_the_budget() -> None:
    known = ran({0: 1.0, 1: 1.1, 2: 1.2})
    state = TuningState(forecasts([0.0] * 3 + [5.0] * 37), known, new=3, audit=0.5, problem="a")
    drawn = audit_of(state)
    assert 5 < len(drawn) < 32
    assert not set(drawn) & set(known)
    assert audit_of(replace(state, audited=True)) == ()
    assert len(audit_of(replace(state, budget=Budget(measurements=5)))) == 2
    assert audit_of(replace(state, audit=1.0)) == tuple(NAMES[3:])


def test_audits_differ_between_problems_and_keep_their_probability() -> None:
    """Drawn by problem: otherwise the same configs of a kernel would be audited at every shape."""
    known = ran({0: 1.0, 1: 1.1, 2: 1.2})
    state = TuningState(forecasts([0.0] * 3 + [5.0] * 7), known, new=3, audit=0.3)
    counted: Counter[Candidate] = Counter()
    for number in range(400):
        counted.update(audit_of(replace(state, problem=f"problem {number}")))
    for name in NAMES[3:10]:
        assert 75 < counted[name] < 165, "0.3 of 400 is 120; 45 is five standard deviations"


def test_fixed_baselines_take_their_count() -> None:
    state = TuningState(forecasts([0.0] * 20), {})
    assert rows(Fixed(4).plan(state)) == [0, 1, 2, 3]
    drawn = rows(Fixed(4, random=True).plan(state))
    assert len(set(drawn)) == 4
    assert drawn != rows(Fixed(4, random=True).plan(replace(state, seed=1)))
    known = ran(dict.fromkeys(range(3), 1.0))
    assert rows(Fixed(4).plan(replace(state, measured=known, new=3))) == [3]


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


# --- by wall time: what is worth its seconds, what goes on compiling, and when it ends ---


def state(
    means: Sequence[float],
    seconds: Sequence[float] | float = 0.5,
    *,
    sd: float = 0.1,
    measured: Mapping[int, float] | None = None,
    ready: Sequence[int] = (),
    compiling: Sequence[int] = (),
    **changes: Any,
) -> TuningState:
    """Forecasts of log2(ms), expected compile seconds, what ran in ms, and rows that are compiled or compile."""
    n, known = len(means), measured or {}
    compile_s = np.array(np.broadcast_to(seconds, n), dtype=float)
    compile_s[[*ready, *known]] = 0.0
    given: dict[str, Any] = {"workers": 4, "new": len(known), **changes}
    return TuningState(
        forecasts(means, sd),
        ran(known),
        ready=[NAMES[i] for i in ready],
        compiling=[NAMES[i] for i in compiling],
        compile_s=compile_s,
        **given,
    )


def spread(count: int, best: int) -> list[float]:
    return [0.0 if i == best else 2.0 + 0.01 * i for i in range(count)]


def test_one_of_each_program_is_measured() -> None:
    programs = np.array([0, 0, 0, 1, 1, 2])
    assert state([0.0] * 6, programs=programs).pending().tolist() == [0, 3, 5]
    assert state([0.0] * 6, programs=programs, compiling=[1, 4]).pending().tolist() == [1, 4, 5]
    assert state([0.0] * 6, programs=programs, compiling=[1, 4], ready=[2]).pending().tolist() == [1, 4, 5]
    assert state([0.0] * 6, programs=programs, measured={1: 1.0, 5: 2.0}).pending().tolist() == [3]


def test_a_program_that_the_harness_could_not_measure_is_tried_in_another_candidate() -> None:
    programs = np.array([0, 0, 1])
    fault, one = failed(0, outcome=Outcome.INFRASTRUCTURE), state([0.0] * 3, programs=programs)
    assert replace(one, measured=fault).pending().tolist() == [1, 2]
    assert replace(one, measured=failed(0)).pending().tolist() == [2]


def test_every_worker_has_something_to_compile() -> None:
    for workers in (1, 4, 8):
        plan = WallTime().plan(state(spread(20, 3), workers=workers))
        assert len(plan.measure) == workers
        assert 3 in rows(plan)
        assert plan.within_s == WallTime().patience_s
        assert plan.prefetch == ()


def test_a_long_compilation_has_to_promise_more() -> None:
    seconds = [0.5] * 20
    seconds[7] = 2.0
    for sooner, later in ((6, 7), (7, 6)):
        means = spread(20, sooner)
        means[later] = means[sooner]
        assert rows(WallTime().plan(state(means, seconds, workers=1))) == [6], "as good, and sooner"
    means[7] = -10.0
    assert rows(WallTime().plan(state(means, seconds, workers=1))) == [7], "worth its seconds"


def test_what_promises_too_little_for_its_seconds_is_not_waited_for() -> None:
    known = {0: 1.0, 1: 1.0, 2: 1.0}
    for gain, seconds, waits in ((0.02, 20.0, False), (1.0, 0.1, True), (3.0, 8.0, True)):
        means = [0.0, 0.0, 0.0, -gain]
        # Either way the risk is accepted: this is of seconds alone.
        plan = WallTime().plan(state(means, seconds, sd=0.01, measured=known, risk=1.0))
        assert (rows(plan) == [3]) is waits, plan.reason
        if waits:
            assert "worth the seconds" in plan.reason
        else:
            assert "accepted" in plan.reason


def test_a_risk_that_is_not_accepted_is_waited_for() -> None:
    plan = WallTime().plan(
        state([0.0, 0.0, 0.0, -0.1], 20.0, sd=0.01, measured={0: 1.0, 1: 1.0, 2: 1.0}, risk=0.1)
    )
    assert rows(plan) == [3]
    assert "risk that a better one is untried" in plan.reason


def test_two_times_are_enough_where_a_third_cannot_win() -> None:
    for third, more in ((3.0, []), (-1.0, [2])):
        plan = WallTime().plan(state([0.0, 0.1, third], 20.0, sd=0.1, measured={0: 1.0, 1: 1.1}))
        assert rows(plan) == more, plan.reason
    assert rows(WallTime().plan(state([0.0, 3.0, 3.0], sd=0.1, measured={0: 1.0}))), "one is a guess"


def test_a_worker_that_is_busy_with_what_may_win_keeps_it() -> None:
    means = [0.0] + [-0.3] * 8 + [1.0] * 11
    busy = [5, 6, 7, 8]
    seconds = [0.1] * 20
    for i in busy:
        seconds[i] = 2.0  # the others would be sooner
    plan = WallTime().plan(state(means, seconds, sd=0.2, measured={0: 1.0}, compiling=busy))
    assert set(busy) <= set(rows(plan))
    assert len(plan.measure) == 4, "and nobody gets their workers"


def test_what_is_compiled_already_comes_first() -> None:
    plan = WallTime().plan(state(spread(20, 3), ready=[10, 11]))
    assert set(rows(plan)) == {10, 11}, "binaries of an earlier decision may be all that it takes"
    one = state(spread(20, 3), measured={0: 4.0}, sd=1.0, ready=[3, 10])
    assert rows(WallTime().plan(one)) == [3, 10], "they are timed while that is worth its seconds"
    later = WallTime().plan(replace(one, spent=MeasuringCost(compiled=1)))
    assert rows(later)[0] == 3
    assert len(later.measure) == 6, "what is compiled takes no worker"


def test_what_compiles_far_too_long_is_expected_to_be_slow() -> None:
    known = {0: 1.0, 1: 1.0, 2: 1.0}
    plain = state([0.0, 0.0, 0.0, -0.5], 1.0, sd=0.05, measured=known, compiling=[3])
    assert rows(WallTime().plan(plain)) == [3]
    late = replace(plain, slowdown=np.array([0.0, 0.0, 0.0, 2.0]))
    assert WallTime().plan(late).measure == ()
