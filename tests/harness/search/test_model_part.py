"""What a search says of the language models that were named: asked or not and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from forecast_harness.records import MODEL_NOTE, SearchCost
from forecast_harness.search.events import Forecasted, Started
from forecast_harness.search.report.figures import build_report, model_text, summary_lines
from forecast_harness.search.report.render import render_parts
from forecast_harness.search.state import SearchState, replay_events
from tests.harness.search.example_log import ExampleSearch


def forecast_by_model(*, fail: bool = False) -> SearchState:
    """The example, as if a language model had forecast the first batch and failed, or not, at the second."""

    def events() -> Iterator[Any]:
        for event in ExampleSearch(batches=2).events():
            if isinstance(event, Started):
                yield replace(event, context=replace(event.context, surrogate="llm-1-forecast-2-m+lineage"))
            elif isinstance(event, Forecasted) and event.batch == 1:
                moved = {
                    name: replace(b, note=f"{b.note}{MODEL_NOTE}+0.20") for name, b in event.beliefs.items()
                }
                yield replace(event, beliefs=moved, spent=SearchCost(wall_seconds=1.5, tokens=1200))
            elif isinstance(event, Forecasted):
                yield replace(event, problem="m: no answer" if fail else "")
            else:
                yield event

    return replay_events(events())


def test_the_report_says_what_was_asked_and_what_it_moved() -> None:
    state = forecast_by_model(fail=True)
    told = dict(summary_lines(state))["language model"]
    beliefs = [len(b.forecasted.beliefs) for b in state.batches.values() if b.forecasted is not None]
    assert told.startswith(
        f"asked for forecasts in 2 batches, moved {beliefs[0]} of {sum(beliefs)} forecasts, 1,200 tokens"
    )
    assert "not heard: m: no answer (1x)" in told
    assert "Language model: asked for forecasts in 2 batches" in render_parts(build_report(state))["content"]


def test_writers_are_counted_and_forecasts_not_asked_for_are_named() -> None:
    told = model_text(replay_events(ExampleSearch(batches=2).events()))
    assert told.startswith("not asked for forecasts: --surrogate llm:SPEC asks one; llm:coder asked ")
    assert "times for sources: " in told


def test_without_a_model_nothing_is_said() -> None:
    def events() -> Iterator[Any]:
        yield from ExampleSearch(batches=0, confirmed=False, stopped=False).events()

    state = replay_events(events())
    assert model_text(state) == ""
    assert "language model" not in dict(summary_lines(state))
