"""Traces of sources: each config of each is traced once, and what is asked for together is traced together."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from forecast_autotune.records import Argument, Config
from forecast_autotune.records.problem import ADDRESS
from forecast_autotune.variants import Origin, Provenance
from forecast_autotune.variants.signature import call_form
from forecast_harness.records import Node, SearchTarget
from forecast_harness.sandbox.jobs import JobResult, SandboxJob
from forecast_harness.sandbox.lane_pools import CpuLanes
from forecast_harness.targets.search_target import configs_for
from forecast_harness.trials.configs.source_configs import FEWEST_CONFIGS, configs_to_launch
from forecast_harness.trials.configs.variant_tracing import TRACE_LIMITS, SourceTraces, VariantTracer
from forecast_harness.trials.kernel_calls import TimedCall
from forecast_harness.trials.race_job import _with_facts
from tests.harness.variant_kernels import CONFIGS as LISTED
from tests.harness.variant_kernels import (
    DOUBLE,
    SOFTMAX,
    rows,
    search_target,
    softmax_call,
    subject,
    vector_call,
)

BASE = subject(DOUBLE, vector_call(1000))


@pytest.mark.parametrize(
    "grid", [5, ["x"], [0], [-1], [1.5], [True], [], [1] * 4, [10**39], [1 << 31], {"x": 1}, None]
)
def test_a_grid_that_no_device_launches_is_none(grid: object) -> None:
    value = {"ttir": ["no module"], "which": [0, None], "grids": [grid, [2, 3]]}
    result = _with_facts(TimedCall.of(BASE), value, 2)
    assert result["grids"] == [None, [2, 3]]
    assert result["facts"] == {"0": [[None, None]]}


def test_a_call_is_timed_where_in_a_line_of_the_cache_it_was_made() -> None:
    call = [replace(a, extra={ADDRESS: 16}) if a.kind == "tensor" else a for a in vector_call(1000)]
    given = TimedCall.of(subject(DOUBLE, tuple(call))).to_payload()
    assert {(t["late"], str(t["extra"])) for t in given["tensors"]} == {(4, "{}")}
    assert call_form(call) == call_form(vector_call(1000)), (
        "what is right at one address is right at the others"
    )


GRID = [
    Config(kwargs=(("BLOCK", block), ("ROWS", rows)), num_warps=warps, num_stages=stages)
    for block, rows, warps, stages in itertools.product(
        (64, 128, 256, 512), (1, 2, 4), (1, 2, 4, 8), (1, 2, 5)
    )
]


def test_no_more_are_launched_than_show_every_value_and_every_schedule() -> None:
    alike = [c for c in GRID if c.num_stages == 1 and dict(c.kwargs)["ROWS"] == 1]
    chosen = configs_to_launch(alike)
    assert len(chosen) == FEWEST_CONFIGS
    assert {c.num_warps for c in chosen} == {1, 2, 4, 8}
    assert {dict(c.kwargs)["BLOCK"] for c in chosen} == {64, 128, 256, 512}
    assert len(configs_to_launch(alike[:FEWEST_CONFIGS])) == FEWEST_CONFIGS


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
    result = traces.get(DOUBLE, LISTED, [2])
    assert noted.asked == [[4096]]
    assert [set(one.configs) for one in result] == [set(), set(), set(LISTED)]
    assert result[2].arguments[0].shape == (4096,)
    assert [result[2].configs[c].grid for c in LISTED] == [(64,), (32,)]


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
    assert taught[0] > plain[0] + 1, "so slow are its kin"
    assert (whole.sd > 0).all(), "at the other call nothing is known of its kin"
