"""Plans by wall time: what is worth its seconds, what goes on compiling, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forecast_autotune.policy import REFUSED, RiskBounded, TuningState, WallTime
from forecast_autotune.records import Candidate, Config, Measurement, MeasuringCost, Outcome, Plan
from forecast_autotune.settings import Budget
from forecast_autotune.surrogates.protocol import Forecasts

NAMES = [Candidate(Config.of({"N": n})) for n in range(40)]


def ran(times: Mapping[int, float]) -> dict[Candidate, Measurement]:
    return {NAMES[row]: Measurement("p", NAMES[row], Outcome.OK, ms) for row, ms in times.items()}


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
    forecasts = Forecasts(NAMES[:n], np.array(means), np.full(n, sd), np.zeros(n))
    compile_s = np.array(np.broadcast_to(seconds, n), dtype=float)
    compile_s[[*ready, *known]] = 0.0
    given: dict[str, Any] = {"workers": 4, "new": len(known), **changes}
    return TuningState(
        forecasts,
        ran(known),
        ready=[NAMES[i] for i in ready],
        compiling=[NAMES[i] for i in compiling],
        compile_s=compile_s,
        **given,
    )


def rows(plan: Plan) -> list[int]:
    return [NAMES.index(c) for c in plan.measure]


def spread(count: int, best: int) -> list[float]:
    return [0.0 if i == best else 2.0 + 0.01 * i for i in range(count)]


def test_one_of_each_program_is_measured() -> None:
    programs = np.array([0, 0, 0, 1, 1, 2])
    assert state([0.0] * 6, programs=programs).pending().tolist() == [0, 3, 5]
    assert state([0.0] * 6, programs=programs, compiling=[1, 4]).pending().tolist() == [1, 4, 5]
    assert state([0.0] * 6, programs=programs, compiling=[1, 4], ready=[2]).pending().tolist() == [2, 4, 5]
    assert state([0.0] * 6, programs=programs, measured={1: 1.0, 5: 2.0}).pending().tolist() == [3]


def test_a_program_that_the_harness_could_not_measure_is_tried_in_another_candidate() -> None:
    programs = np.array([0, 0, 1])
    failed = {NAMES[0]: Measurement("p", NAMES[0], Outcome.INFRASTRUCTURE)}
    assert replace(state([0.0] * 3, programs=programs), measured=failed).pending().tolist() == [1, 2]
    broken = {NAMES[0]: Measurement("p", NAMES[0], Outcome.OUT_OF_RESOURCES)}
    assert replace(state([0.0] * 3, programs=programs), measured=broken).pending().tolist() == [2]


def test_without_compile_seconds_it_plans_in_rounds_as_its_base() -> None:
    plain = replace(state(spread(20, 3)), compile_s=None)
    assert WallTime().plan(plain) == RiskBounded().plan(plain)
    assert WallTime().plan(plain).within_s is None


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


def test_it_ends_where_nothing_can_win() -> None:
    plan = WallTime().plan(state([0.0, 0.1, 0.2, 3.0, 4.0], measured={0: 1.0, 1: 1.1, 2: 1.2}))
    assert plan.measure == ()
    assert "accepted" in plan.reason


def test_a_worker_that_is_busy_with_what_may_win_keeps_it() -> None:
    means = [0.0] + [-0.3] * 8 + [1.0] * 11
    busy = [5, 6, 7, 8]
    seconds = [0.1] * 20
    for i in busy:
        seconds[i] = 2.0  # the others would be sooner
    plan = WallTime().plan(state(means, seconds, sd=0.2, measured={0: 1.0}, compiling=busy))
    assert set(busy) <= set(rows(plan))
    assert len(plan.measure) == 4, "and nobody gets their workers"


def test_a_worker_that_is_busy_with_what_cannot_win_is_free_for_others() -> None:
    means = [0.0] + [-0.3] * 4 + [4.0] * 5
    plan = WallTime().plan(state(means, sd=0.1, measured={0: 1.0}, compiling=[5, 6, 7, 8]))
    assert set(rows(plan)) == {1, 2, 3, 4}


def test_of_what_began_before_the_first_timing_only_the_best_goes_on() -> None:
    plan = WallTime().plan(state([0.0, 0.1, 0.2, 0.3, 3.0, 3.0, 3.0, 3.0], compiling=[4, 5, 6, 7]))
    assert set(rows(plan)) == {0, 1, 2, 3}


def test_what_is_compiled_already_comes_first() -> None:
    plan = WallTime().plan(state(spread(20, 3), ready=[10, 11]))
    assert set(rows(plan)) == {10, 11}, "binaries of an earlier decision may be all that it takes"
    one = state(spread(20, 3), measured={0: 4.0}, sd=1.0, ready=[3, 10])
    assert rows(WallTime().plan(one)) == [3, 10], "they are timed while that is worth its seconds"
    later = WallTime().plan(replace(one, spent=MeasuringCost(compiled=1)))
    assert rows(later)[0] == 3
    assert len(later.measure) == 6, "what is compiled takes no worker"


def test_what_is_compiled_and_cannot_win_keeps_nothing_from_compiling() -> None:
    plan = WallTime().plan(state(spread(20, 3), measured={0: 4.0}, sd=0.02, ready=[19]))
    assert rows(plan)[0] == 3


def test_what_compiles_far_too_long_is_expected_to_be_slow() -> None:
    known = {0: 1.0, 1: 1.0, 2: 1.0}
    plain = state([0.0, 0.0, 0.0, -0.5], 1.0, sd=0.05, measured=known, compiling=[3])
    assert rows(WallTime().plan(plain)) == [3]
    late = replace(plain, slowdown=np.array([0.0, 0.0, 0.0, 2.0]))
    assert WallTime().plan(late).measure == ()


@pytest.mark.parametrize(("timed", "waits"), [(2, True), (7, False)])
def test_what_may_win_is_waited_for_longer_while_little_is_timed(timed: int, waits: bool) -> None:
    one = state(
        [5.0] * 12 + [0.4],
        [9.0] * 12 + [0.12],
        sd=0.2,
        measured=dict.fromkeys(range(timed), 1.0),
        compiling=[12],
    )
    assert (rows(WallTime().plan(one))[:1] == [12]) is waits


def test_what_is_sure_to_fail_is_refused_unless_nothing_else_is_left() -> None:
    one = state([5.0, 0.0, 5.0])
    fails = replace(one, forecasts=replace(one.forecasts, p_fail=np.array([0.0, REFUSED, 0.0])))
    assert 1 not in rows(WallTime().plan(fails))
    failed = {NAMES[i]: Measurement("p", NAMES[i], Outcome.COMPILE_ERROR) for i in (0, 2)}
    assert rows(WallTime().plan(replace(fails, measured=failed, new=2))) == [1]


def test_a_limit_of_measurements_counts_what_compiles() -> None:
    one = state(spread(20, 3), budget=Budget(measurements=2), workers=8)
    assert len(WallTime().plan(one).measure) == 2
    none_left = state(spread(20, 3), sd=2.0, measured={0: 4.0, 1: 4.0}, budget=Budget(measurements=2))
    plan = WallTime().plan(none_left)
    assert plan.measure == ()
    assert "budget" in plan.reason


def test_there_is_a_measurement_for_every_worker() -> None:
    few = state([0.0] * 20, sd=1.0, workers=16)
    assert WallTime().cap(few) == 16 > RiskBounded().cap(few)
    assert WallTime().cap(replace(few, budget=Budget(measurements=3))) == 3


def test_the_audit_is_drawn_once_the_risk_is_accepted() -> None:
    done = state([0.0, 0.1, 0.2, 3.0, 4.0], measured={0: 1.0, 1: 1.1, 2: 1.2}, audit=1.0)
    plan = WallTime().plan(done)
    assert set(rows(plan)) == {3, 4} == {NAMES.index(c) for c in plan.audit}
    assert plan.within_s is None, "an audit is measured whole"
    assert WallTime().plan(replace(done, audited=True)).measure == ()


def test_it_goes_on_while_everything_has_failed() -> None:
    failed = {NAMES[i]: Measurement("p", NAMES[i], Outcome.COMPILE_ERROR) for i in range(3)}
    one = replace(state([0.0, 0.0, 0.0, 5.0], budget=Budget(measurements=3)), measured=failed, new=3)
    plan = WallTime().plan(one)
    assert rows(plan) == [3]
    assert plan.risk == 1.0
    assert math.isinf(one.best())
