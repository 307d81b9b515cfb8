"""Listening to `triton.autotune`: the sweep that Triton would make, kept."""

from __future__ import annotations

from forecast_autotune.settings import Mode
from forecast_autotune.store import Store
from forecast_autotune.tuning.results import NEGLIGIBLE_GAIN
from tests.core.tuning.loop import TABLE, Bench, Told, constant, decide


def test_listening_measures_what_the_host_would_and_keeps_it() -> None:
    store, bench = Store(None), Bench(TABLE)
    surrogate = Told(constant(sd=0.0))
    decision = decide(store, bench, surrogate=surrogate, mode=Mode.LISTEN)
    everything = {m.candidate for m in TABLE.measurements}
    assert set(bench.asked) == everything
    assert {m.candidate for m in store.measurements(TABLE.problem)} == everything
    best = min(m.ms for m in TABLE.measurements if m.ok)
    assert decision.median_ms <= (1.0 + NEGLIGIBLE_GAIN) * best
