"""Spans and counters as the application's own providers get them."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from forecast_autotune.telemetry import spans

READER = InMemoryMetricReader()
SPANS = InMemorySpanExporter()


@pytest.fixture(scope="module", autouse=True)
def application() -> None:
    """What an application sets up once, for its whole life."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(SPANS))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([READER]))


@pytest.fixture
def told() -> InMemorySpanExporter:
    SPANS.clear()
    spans.configure("otel")
    return SPANS


def test_spans_are_children_of_the_applications_own(told: InMemorySpanExporter) -> None:
    with trace.get_tracer("application").start_as_current_span("serve"):
        with spans.span("decide", kernel="k", candidates=9) as shown:
            spans.record("compile", "compile", 1.0, 2.5, outcome="ok")
            shown.set(measured=3)
        with pytest.raises(ValueError, match="of the kernel's"), spans.span("decide"):
            raise ValueError("of the kernel's")
    results: dict[str, Any] = {}
    for span in told.get_finished_spans():
        results.setdefault(span.name, span)
    decide, compiled, serve = (
        results[name] for name in ("forecast_autotune.decide", "forecast_autotune.compile", "serve")
    )
    assert decide.parent.span_id == serve.context.span_id
    assert compiled.parent.span_id == decide.context.span_id
    assert dict(decide.attributes) == {
        "forecast_autotune.kernel": "k",
        "forecast_autotune.candidates": 9,
        "forecast_autotune.measured": 3,
    }
    assert compiled.end_time - compiled.start_time == pytest.approx(1.5e9, abs=1e3)
    failed = told.get_finished_spans()[-2]
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert failed.events == ()  # an exception's text may hold anything


def test_counters_are_the_meters(told: InMemorySpanExporter) -> None:
    spans.count("misses", 1, kernel="k")
    spans.count("seconds_saved", 2.5, kernel="k")
    spans.count("seconds_saved", -0.5, kernel="k")
    data = READER.get_metrics_data()
    assert data is not None
    sums = {
        metric.name: (metric.unit, metric.data.data_points[0].value)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert sums["forecast_autotune.misses"] == ("1", 1)
    assert sums["forecast_autotune.seconds_saved"] == ("s", 2.0)


def test_without_the_package_there_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.warns(RuntimeWarning, match=r"pip install 'forecast-autotune\[telemetry\]'"):
        spans.configure("otel")
    with warnings.catch_warnings(), spans.span("decide"):
        warnings.simplefilter("error")
        spans.configure("otel")
