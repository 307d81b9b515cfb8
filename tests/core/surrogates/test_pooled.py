"""The pooled surrogate: what other devices say of the same configs, and how it is corrected here."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.policy import TuningState, stated_risk
from forecast_autotune.records import Candidate, Config, Device, Kernel, Measurement, Outcome, Problem
from forecast_autotune.surrogates.pooled import PooledSurrogate
from forecast_autotune.surrogates.protocol import Query, Relative
from forecast_autotune.testing import SurrogateContract

NAMES = CandidateList(
    Candidate(Config.of({"BLOCK": 2**i, "TILE": 2**j})) for i, j in itertools.product(range(12), range(4))
)


class TestPooled(SurrogateContract):
    def make(self) -> PooledSurrogate:
        return PooledSurrogate()


def curve(best: float) -> list[float]:
    """log2 slowdowns: a bowl in BLOCK around 2^best."""
    return [0.3 * abs(i - best) + 0.2 * abs(j - 1) for i, j in itertools.product(range(12), range(4))]


def problem(device: str = "GPU 0") -> Problem:
    return Problem.of(Kernel("conv", "cuda"), (), Device(device, "cuda"))


def rows(p: Problem, slowdowns: Sequence[float | None]) -> tuple[Measurement, ...]:
    return tuple(
        Measurement(p.id, c, Outcome.RUNTIME_ERROR) if x is None else Measurement(p.id, c, Outcome.OK, 2.0**x)
        for c, x in zip(NAMES, slowdowns, strict=True)
    )


def relative(device: str, slowdowns: Sequence[float | None]) -> Relative:
    return Relative(problem(device), rows(problem(device), slowdowns))


AGREED = [relative(f"GPU {i}", curve(4)) for i in (1, 2, 3)]


def asked(
    relatives: Sequence[Relative] = AGREED, measured: Sequence[Measurement] = (), device: str = "GPU 0"
) -> Query:
    return Query(problem(device), NAMES, {}, measured, relatives)


def near(best: int) -> int:
    return int(np.argmin(curve(best)))


def test_what_was_fastest_elsewhere_is_forecast_to_be_fastest() -> None:
    forecasts = PooledSurrogate().forecast(asked())
    assert int(forecasts.order()[0]) == near(4)
    assert float(np.corrcoef(forecasts.mean, curve(4))[0, 1]) > 0.95
    assert "3 relatives pooled; 0 own" in forecasts.reason


def test_measurements_here_outweigh_relatives_that_are_wrong() -> None:
    here = rows(problem(), curve(9))
    tried = [here[i] for i in (near(4), near(3), near(6), near(8), near(10))]
    forecasts = PooledSurrogate().forecast(asked(measured=tried))
    assert abs(int(forecasts.order()[0]) - near(9)) <= 4
    before = PooledSurrogate().forecast(asked())
    assert before.mean[near(9)] - before.mean[near(4)] > 1.0
    assert forecasts.mean[near(9)] < forecasts.mean[near(4)]


def test_failures_elsewhere_and_here_are_expected() -> None:
    broken: list[float | None] = [None if i >= 40 else x for i, x in enumerate(curve(4))]
    forecasts = PooledSurrogate().forecast(asked([relative("GPU 1", broken), relative("GPU 2", broken)]))
    assert forecasts.p_fail[40:].min() > 0.9
    assert forecasts.p_fail[:40].max() < 0.1
    failure = Measurement(problem().id, NAMES[0], Outcome.OUT_OF_RESOURCES)
    after = PooledSurrogate().forecast(asked(measured=[failure]))
    assert after.p_fail[0] == 1.0
    assert 0.1 < after.p_fail[1] < 1.0
    assert after.p_fail[47] < 0.1


def test_the_stated_risk_heeds_how_the_relatives_fared() -> None:
    """Relatives that predict each other at once lower the risk; others raise it. `raw` keeps that."""
    odd = [relative(f"GPU {i}", curve(b)) for i, b in enumerate((1, 4, 8, 11), 1)]
    here = rows(problem(), curve(4))
    for given, lower in ((AGREED, True), (odd, False)):
        forecasts = PooledSurrogate().forecast(asked(given, here[:1])).uncalibrated()
        assert (forecasts.weigh_risk(0.5) < 0.5) is lower
        state = TuningState(forecasts, {NAMES[0]: here[0]})
        pending = np.arange(1, len(NAMES))
        drawn = np.full((4, len(pending)), 99.0)
        drawn[:2] = -99.0  # half of the draws have a better one
        assert stated_risk(state, pending, drawn) == pytest.approx(forecasts.weigh_risk(0.5))


def test_a_relative_that_grows_is_read_again() -> None:
    """A list of measurements may change between two questions."""
    here = relative("GPU 1", curve(9))
    growing = list(relative("GPU 1", curve(4)).measurements)
    query = asked([Relative(here.problem, growing)])
    surrogate = PooledSurrogate()
    assert int(surrogate.forecast(query).order()[0]) == near(4)
    growing += here.measurements
    assert int(surrogate.forecast(query).order()[0]) == near(9)


def test_threads_do_not_share_what_they_ask() -> None:
    surrogate = PooledSurrogate()
    queries = [asked([relative(f"GPU {i}", curve(b)) for i in (1, 2)]) for b in range(12)]
    results: dict[int, list[int]] = {b: [] for b in range(12)}

    def ask(b: int) -> None:
        for _ in range(5):
            results[b].append(int(surrogate.forecast(queries[b]).order()[0]))

    threads = [threading.Thread(target=ask, args=(b,)) for b in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {b: [near(b)] * 5 for b in range(12)}
