"""Traces of a target with several calls, of which some are asked for before others."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from forecast_autotune.records import Argument
from forecast_autotune.variants import Origin, Provenance
from forecast_harness.records import Node, SearchTarget
from forecast_harness.sandbox.cpu_lanes import CpuLanes
from forecast_harness.sandbox.jobs import JobResult, SandboxJob
from forecast_harness.targets.search_target import configs_for
from forecast_harness.trials.configs.variant_tracing import TRACE_LIMITS, SourceTraces, VariantTracer
from tests.harness.variant_kernels import (
    CONFIGS,
    DOUBLE,
    SOFTMAX,
    rows,
    search_target,
    softmax_call,
    subject,
    vector_call,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox needs Linux")

SIZES = (1000, 64, 4096)
"""Of the vectors of each call."""
TUNABLE = SOFTMAX.replace(
    "@triton.jit",
    'CONFIGS = [{"kwargs": {"BLOCK": b}} for b in (16, 64, 256)]\n\n\n@triton.jit',
    1,
)
SMALL, LARGE = softmax_call(4, 33), softmax_call(256, 1024)


def doubling() -> SearchTarget:
    return search_target(*(subject(DOUBLE, vector_call(n)) for n in SIZES))


def softmax(*calls: Sequence[Argument]) -> SearchTarget:
    return search_target(*(subject(SOFTMAX, call, grid=rows) for call in calls))


def node(source: str) -> Node:
    return Node("node", source, "triton", (), Provenance(Origin.HAND))


class NotedTracing:
    """Sandboxes that trace, and the first tensor's size at each call of each job."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.lanes = CpuLanes(None, TRACE_LIMITS, 1)

    def __call__(self, jobs: Sequence[SandboxJob]) -> list[JobResult]:
        self.asked += [[s["calls"][0][0]["shape"][0] for s in job.payload["subjects"]] for job in jobs]
        return self.lanes.run(jobs)


@pytest.fixture(scope="module")
def lanes() -> Iterator[NotedTracing]:
    result = NotedTracing()
    yield result
    result.lanes.close()


@pytest.fixture
def noted(lanes: NotedTracing) -> NotedTracing:
    lanes.asked.clear()
    return lanes


@pytest.fixture
def traces(noted: NotedTracing) -> Iterator[SourceTraces]:
    result = SourceTraces(doubling())
    result.trace_in(noted)
    yield result
    result.close()


def tracer_of(asked: SearchTarget, noted: NotedTracing) -> VariantTracer:
    result = VariantTracer(asked)
    result.trace_in(noted, lambda: 0)
    return result


def test_only_the_calls_that_are_asked_for_are_traced(traces: SourceTraces, noted: NotedTracing) -> None:
    result = traces.get(DOUBLE, CONFIGS, [2])
    assert noted.asked == [[4096]]
    assert [set(one.texts) for one in result] == [set(), set(), set(CONFIGS)]
    assert result[2].arguments[0].shape == (4096,)
    assert result[2].grids == {CONFIGS[0]: (64,), CONFIGS[1]: (32,)}


def test_who_asks_at_all_calls_has_all_of_them_as_if_none_had_been_traced_before(
    traces: SourceTraces, noted: NotedTracing
) -> None:
    traces.prepare({DOUBLE: CONFIGS}, [2])
    result = traces.get(DOUBLE, CONFIGS)
    assert noted.asked == [[4096], list(SIZES)]
    assert [one.arguments[0].shape[0] for one in result] == list(SIZES)
    fresh = SourceTraces(doubling())
    fresh.trace_in(noted)
    try:
        assert result == fresh.get(DOUBLE, CONFIGS)
    finally:
        fresh.close()
    noted.asked.clear()
    assert traces.get(DOUBLE, CONFIGS) == result
    assert noted.asked == []


@pytest.mark.parametrize("calls", [(SMALL, LARGE), (LARGE, SMALL)])
def test_sources_are_ranked_by_the_largest_call_alone(
    noted: NotedTracing, calls: Sequence[Sequence[Argument]]
) -> None:
    alone, small = tracer_of(softmax(LARGE), noted), tracer_of(softmax(SMALL), noted)
    several = tracer_of(softmax(*calls), noted)
    try:
        wanted = alone.best_forecast(node(TUNABLE))
        assert wanted is not None
        assert small.best_forecast(node(TUNABLE)) != pytest.approx(wanted, rel=1e-3)
        noted.asked.clear()
        several.prepare([node(TUNABLE)])
        assert noted.asked == [[256]]
        assert several.best_forecast(node(TUNABLE)) == pytest.approx(wanted)
        assert several.best_forecast(node("import triton\n")) is None
        assert noted.asked == [[256]], "what was prepared is enough"
    finally:
        for one in (alone, small, several):
            one.close()


def test_what_was_timed_of_a_source_that_was_traced_to_rank_it_is_heeded(noted: NotedTracing) -> None:
    tracer = tracer_of(softmax(SMALL, LARGE), noted)
    sibling = TUNABLE + "# another source\n"
    try:
        configs = configs_for(softmax(LARGE), TUNABLE)
        plain = tracer.best_forecast(node(TUNABLE))
        tracer.prepare([node(sibling)])
        tracer.learn(sibling, {c: [5.0, 500.0] for c in configs})
        taught, whole = tracer.best_forecast(node(TUNABLE)), tracer.forecast(TUNABLE, configs)
    finally:
        tracer.close()
    assert plain is not None
    assert taught is not None
    assert taught[0] > plain[0] + 1, "so slow are its kin"
    assert whole is not None
    assert (whole.sd > 0).all(), "at the other call nothing is known of its kin"
