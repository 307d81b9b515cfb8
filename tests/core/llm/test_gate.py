"""When asking is worth it."""

from __future__ import annotations

from dataclasses import replace

from forecast_autotune.llm.gate import OVERHEAD_S, GateInputs, decide_asking

SKILLED = GateInputs(1000, 16, 0.5, 0.3)
"""A model that saves 30 % of the measurements."""


def test_the_expected_saving_is_weighed_against_the_latency_that_was_measured() -> None:
    """A small gain is a gain: no bound, and no margin, but the overhead of a second belief."""
    worth = decide_asking(SKILLED).worth_s
    assert worth > 0.5
    assert decide_asking(SKILLED).ask, "nobody knows what an answer takes: one is asked for"
    assert decide_asking(replace(SKILLED, answer_s=0.9 * worth - OVERHEAD_S)).ask
    verdict = decide_asking(replace(SKILLED, answer_s=1.1 * worth))
    assert not verdict.ask
    assert f"saves about {worth:.2f} s and takes {1.1 * worth:.2f} s" in verdict.reason


def test_where_nothing_is_measured_the_limit_alone_counts() -> None:
    once = replace(SKILLED, candidates=3, once=True, timeout_s=5.0)
    assert decide_asking(replace(once, answer_s=4.0)).ask
    assert not decide_asking(replace(once, answer_s=6.0)).ask
