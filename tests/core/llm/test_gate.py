"""When asking is worth it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from forecast_autotune.llm.gate import (
    OVERHEAD_S,
    GateInputs,
    decide_asking,
)

SKILLED = GateInputs(1000, 16, 0.5, 0.3, 256, per_token_s=2e-6, load_s=0.0)
"""A model that saves 30 % of the measurements and reads half a million tokens a second, loaded."""
SITUATIONS = st.builds(
    GateInputs,
    candidates=st.integers(0, 20_000),
    workers=st.integers(1, 256),
    compile_s=st.floats(0.0, 60.0),
    saved=st.floats(0.0, 1.0),
    asked=st.integers(1, 256),
    per_token_s=st.floats(0.0, 1e-2),
    load_s=st.floats(0.0, 100.0),
    timeout_s=st.floats(0.01, 1000.0),
)


def test_a_thousand_configs_are_worth_a_call_of_a_skilled_model() -> None:
    verdict = decide_asking(SKILLED)
    assert verdict.ask
    assert verdict.should_wait
    assert verdict.worth_s > 2 * verdict.cost_s


def test_a_cold_model_is_asked_but_not_waited_for() -> None:
    """Loading goes on beside the compilations, once per process: it delays the answer, and costs nobody."""
    cold = decide_asking(replace(SKILLED, load_s=10.0))
    assert cold.ask
    assert not cold.should_wait
    assert cold.cost_s > 10.0


@given(SITUATIONS)
def test_nobody_waits_longer_than_an_answer_is_worth(situation: GateInputs) -> None:
    verdict = decide_asking(situation)
    assert verdict.reason
    if verdict.should_wait:
        assert verdict.cost_s <= verdict.worth_s


def test_the_expected_saving_is_weighed_against_the_latency_that_was_measured() -> None:
    """A small gain is a gain: no bound, and no margin, but the overhead of a second belief."""
    small = replace(SKILLED, saved=0.02)
    worth = decide_asking(replace(small, answer_s=0.0)).worth_s
    assert decide_asking(replace(small, answer_s=0.9 * worth - OVERHEAD_S)).ask
    verdict = decide_asking(replace(small, answer_s=1.1 * worth))
    assert not verdict.ask
    assert f"saves about {worth:.2f} s and takes {1.1 * worth:.2f} s" in verdict.reason
