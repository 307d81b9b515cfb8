"""Which candidates are traced to TTIR, when, and how often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from forecast_autotune.features.ttir.extraction import assignment_key
from forecast_autotune.records import Candidate, Config
from forecast_autotune.tuning.tracing import (
    FULL_TRACE_LIMIT,
    SPREAD_TRACES,
    TRACES_PER_ROUND,
    LazyTraces,
)


def blocks(count: int, warps: Sequence[int] = (4,)) -> list[Candidate]:
    """`count` assignments, each with all of `warps`."""
    return [
        Candidate(Config.of({"A": 2 ** (i % 16), "B": i}, num_warps=w)) for i in range(count) for w in warps
    ]


def key(candidate: Candidate) -> str:
    return assignment_key(dict(candidate.config.kwargs))


class Tracer:
    """Answers for every assignment but those that cannot be traced, and counts."""

    def __init__(self, without: Sequence[Candidate] = ()) -> None:
        self.asked: list[str] = []
        self.without = {key(c) for c in without}

    def __call__(self, wanted: Sequence[Candidate]) -> Mapping[str, str]:
        self.asked += [key(c) for c in wanted]
        return {key(c): f"module {key(c)}" for c in wanted if key(c) not in self.without}


def test_warps_and_stages_share_a_text() -> None:
    tracer = Tracer()
    traces = LazyTraces(blocks(5, warps=(1, 2, 4, 8)), tracer)
    traces.trace_initial()
    assert len(tracer.asked) == len(set(tracer.asked)) == 5
    assert set(traces.texts) == set(tracer.asked)
    assert not traces.trace_best(np.arange(20))
    assert len(tracer.asked) == 5


def test_a_large_list_is_sampled_first_and_followed_by_its_best() -> None:
    candidates, tracer = blocks(3 * FULL_TRACE_LIMIT), Tracer()
    traces = LazyTraces(candidates, tracer)
    traces.trace_initial()
    assert len(traces.texts) == SPREAD_TRACES
    order = np.arange(len(candidates))[::-1]
    fresh = [key(candidates[i]) for i in order if key(candidates[i]) not in traces.texts]
    assert traces.trace_best(order)
    assert tracer.asked[SPREAD_TRACES:] == fresh[:TRACES_PER_ROUND], "best first"
    while traces.trace_best(order):
        pass
    assert sorted(tracer.asked) == sorted({key(c) for c in candidates}), "each once, all in the end"
    everything = LazyTraces(candidates, Tracer())
    everything.trace_initial(everything=True)
    assert len(everything.texts) == len(candidates)


def test_what_cannot_be_traced_is_not_asked_again_nor_a_reason_to_forecast_again() -> None:
    candidates = blocks(3)
    tracer = Tracer(without=candidates[:2])
    traces = LazyTraces(candidates, tracer)
    assert not traces.start_initial(), "a tracer that can only be called has no background"
    assert not traces.poll()
    traces.close()
    traces.trace_initial()
    assert set(traces.texts) == {key(candidates[2])}
    assert not traces.trace_best(np.arange(3))
    assert len(tracer.asked) == 3
    many = blocks(3 * FULL_TRACE_LIMIT)
    tracer = Tracer(without=many)
    traces = LazyTraces(many, tracer)
    traces.trace_initial()
    assert not traces.trace_best(np.arange(len(many)))
    assert len(tracer.asked) == SPREAD_TRACES + TRACES_PER_ROUND
    without = LazyTraces(blocks(3), None)
    without.trace_initial()
    assert not without.trace_best(np.arange(3))
    assert without.texts == {}


class Background(Tracer):
    """Answers one assignment a poll, and counts."""

    def __init__(self) -> None:
        super().__init__(())
        self.waiting: list[Candidate] = []

    @property
    def outstanding(self) -> int:
        return len(self.waiting)

    def start(self, wanted: Sequence[Candidate]) -> None:
        self.waiting += wanted

    def poll(self, timeout_s: float) -> Mapping[str, str]:
        return self([self.waiting.pop(0)]) if self.waiting else {}

    def close(self) -> None:
        self.waiting.clear()


def test_traces_come_in_from_the_background_each_once() -> None:
    candidates, tracer = blocks(5), Background()
    traces = LazyTraces(candidates, tracer)
    assert traces.start_initial()
    assert traces.outstanding == 5
    assert traces.texts == {}, "nobody has waited yet"
    assert traces.poll()
    assert len(traces.texts) == 1
    assert traces.start_initial(), "still under way"
    traces.finish()
    assert (len(traces.texts), traces.outstanding) == (5, 0)
    assert not traces.poll()
    assert not traces.start_initial()
    traces.trace_initial()
    assert sorted(tracer.asked) == sorted(key(c) for c in candidates)


class KnowingAll(Background):
    """Has read what it is asked for before `start` returns, as a tracer that remembers another shape's IR."""

    @property
    def outstanding(self) -> int:
        return 0

    def poll(self, timeout_s: float) -> Mapping[str, str]:
        came, self.waiting = self(self.waiting), []
        return came


def test_what_was_known_before_is_there_as_soon_as_it_is_asked_for() -> None:
    candidates, tracer = blocks(5), KnowingAll()
    traces = LazyTraces(candidates, tracer)
    assert not traces.start_initial()
    assert set(traces.texts) == {key(c) for c in candidates}
    traces.trace_initial()
    assert tracer.asked == [key(c) for c in candidates], "each once"
