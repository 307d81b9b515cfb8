"""What is told of decisions: the same figures as the summary line has."""

from __future__ import annotations

from typing import Any

import pytest

from forecast_autotune.errors import FrozenMissError
from forecast_autotune.records import Decision
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.store import Store
from forecast_autotune.telemetry.spans import DecisionSpan
from forecast_integrations.commands.run import RunSummary
from tests.core.ranks.small_jobs import TABLE, decide
from tests.core.telemetry.recorder import Recorder


@pytest.fixture
def decided(recorder: Recorder) -> Any:
    """Decides the example problem; the recorder hears of it."""
    store = Store(None)

    def here(**changes: Any) -> Decision:
        return decide(None, store=store, settings=Settings(**changes))

    return here


def test_a_decision_and_a_hit_add_up_to_the_summary(decided: Any, recorder: Recorder) -> None:
    tally = RunSummary()
    fresh = decided()
    assert tally.line() == "no kernel had to be tuned"
    tally.add_decision("k", fresh)
    tally.add_decision("k", decided())
    told = {"measured": fresh.measured, "seconds": fresh.cost.wall_s, "saved_s": fresh.saved_s}
    assert tally.to_json() == {"decisions": 2, "stored": 1, "candidates": 15, **told}
    shown = f"{fresh.measured} of 15 candidates measured, {fresh.cost.wall_s:.1f} s spent, about {fresh.saved_s:.0f} s"
    assert shown in tally.line()
    first, second = recorder.named("decide")
    assert fresh.measured > 0
    assert first["measured"] == fresh.measured
    assert first["seconds_saved"] == fresh.saved_s
    left_out = fresh.trusted * fresh.cost.compile_s / fresh.cost.compiled
    assert fresh.saved_s == pytest.approx(left_out) != 0.0, "one after the other"
    assert first["chosen"] == str(fresh.chosen)
    assert first["why"] == fresh.rounds[-1]
    assert (first["mode"], first["evidence"], second["evidence"]) == ("tune", "measured", "stored")
    assert "seconds_saved" not in second
    assert recorder.counted == {
        "hits": tally.stored,
        "misses": 1,
        "measured": tally.measured,
        "seconds_saved": tally.saved_s,
    }
    parents = {name: parent for name, _, parent in recorder.spans}
    assert parents["forecast"] == "decide"
    assert parents["decide"] == ""


def test_a_key_that_was_met_before_is_not_counted_again(decided: Any, recorder: Recorder) -> None:
    fresh = decided()
    before = dict(recorder.counted)
    with DecisionSpan(TABLE.problem, Settings(), met_now=False) as span:
        assert span.conclude(fresh) is fresh
    assert recorder.counted == {name: n if name == "misses" else 2 * n for name, n in before.items()}


def test_a_frozen_miss_is_a_miss(decided: Any, recorder: Recorder) -> None:
    with pytest.raises(FrozenMissError):
        decided(mode=Mode.FROZEN)
    (span,) = recorder.named("decide")
    assert (span["outcome"], span["failed"]) == ("FrozenMissError", True)
    assert recorder.counted == {"misses": 1}
