"""What the report says, and what its charts and tables are made of."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from typing import Any

import pytest
from rich.console import Console

from forecast_autotune.commands.output import Output
from forecast_autotune.records import Outcome
from forecast_harness.records import MODEL_NOTE, NodeResult, SearchCost
from forecast_harness.search.events import Confirmed, Forecasted, Started
from forecast_harness.search.report import figures, page, render
from forecast_harness.search.report.figures import (
    BestResult,
    SearchReport,
    build_report,
    factor_text,
    summary_lines,
)
from forecast_harness.search.report.live import LiveDisplay
from forecast_harness.search.report.render import render_parts
from forecast_harness.search.state import SearchState, apply_event, replay_events
from tests.harness.search.example_log import ExampleSearch


def story_of(example: ExampleSearch) -> tuple[SearchState, SearchReport]:
    state = replay_events(example.events())
    return state, build_report(state)


# --- the story ---


def test_the_claim_is_the_confirmed_time_with_its_interval() -> None:
    state, story = story_of(ExampleSearch())
    final = story.final
    assert final.evidence == "confirmed"
    assert final.node == state.best
    judged = state.confirmed[state.best]
    assert judged.log2_ratio is not None
    assert final.speedup == pytest.approx(2**-judged.log2_ratio)
    low, high = final.interval
    assert math.log2(high / final.speedup) == pytest.approx(1.96 * judged.sd)
    assert math.log2(final.speedup / low) == pytest.approx(1.96 * judged.sd)


def test_without_a_confirmation_the_error_grows_along_the_chain_of_comparisons() -> None:
    state, story = story_of(ExampleSearch(confirmed=False))
    final = story.final
    assert final.evidence == ""
    links, name = 0, final.node
    while name != state.seeds[0]:
        links, name = links + 1, state.judged[name].against
    assert links > 2
    assert final.sd == pytest.approx(0.012 * math.sqrt(links))
    assert "not confirmed" in figures.best_card(final).name


def test_a_search_that_found_nothing_does_not_claim_noise() -> None:
    _, story = story_of(ExampleSearch(failing=1.0))
    assert story.final is None
    assert figures.best_card(story.final).value == "-"
    assert figures.per_percent(story.final, story.state.spent)[0] == "-"
    slower = BestResult("n", 0.01, 0.01, "confirmed")
    assert "nothing faster" in figures.best_card(slower).name
    assert figures.per_percent(slower, SearchCost(9, 9.0))[0] == "-"


def test_an_interval_that_reaches_one_is_not_shown_as_a_success() -> None:
    assert figures.best_card(BestResult("n", -0.10, 0.01, "confirmed")).css == "good"
    assert figures.best_card(BestResult("n", -0.01, 0.01, "undecided")).css == "fair"


def test_costs_add_up_and_are_divided_by_the_time_saved() -> None:
    state, story = story_of(ExampleSearch())
    assert sum(state.spent_on.values(), SearchCost()).tokens == story.state.spent.tokens == state.spent.tokens
    final = story.final
    saved = 100 * (1 - 1 / final.speedup)
    shown, rest = figures.per_percent(final, story.state.spent)
    assert shown == f"{story.state.spent.device_seconds / saved:.2f} s"
    assert f"{story.state.spent.tokens / saved:,.0f} tokens" in rest
    kinds = figures.cost_rows(story)
    assert kinds[-1][0] == "in all"
    assert kinds[-1][1] == f"{len(state.history)}"


# --- progress ---


def test_the_progress_curve_ends_at_the_best_and_never_falls() -> None:
    _, story = story_of(ExampleSearch(confirmed=False))
    chart = figures.progress_chart(story)
    heights = [float(v) for v in re.findall(r"V([\d.]+)", chart.path)]
    assert heights == sorted(set(heights), reverse=True)  # upwards on paper is downwards in numbers
    assert heights[-1] == 0
    assert (chart.top, chart.measurements) == (factor_text(-story.final.score), len(story.state.history))
    # A source that its confirmation alone verified in full comes at the end.
    story.state.history[:] = [replace(point, best=0.0) for point in story.state.history]
    late = figures.progress_chart(story)
    assert late.path == "M0 160H600.0V0.0H600"


def test_the_page_says_how_many_forecasts_held_what_was_measured() -> None:
    _, story = story_of(ExampleSearch())
    told = (e for e in story.entries.values() if e.belief and not e.belief.abstains)
    beliefs = [(e.belief, e.measured) for e in told if e.measured is not None]
    held = sum(abs(m - b.mean) <= 1.6449 * b.sd for b, m in beliefs)
    assert f"{held} of {len(beliefs)} forecasts" in render_parts(story)["content"]
    assert figures.coverage_text(story_of(ExampleSearch(forecasts=False))[1]) == ""


def test_measured_is_relative_to_what_the_forecast_was_about() -> None:
    """Forecast against one node, timed beside another: the difference of their scores lies between."""
    state = replay_events(ExampleSearch(batches=3, confirmed=False).events())
    story = build_report(state)
    for entry in story.entries.values():
        if entry.measured is not None:
            assert entry.measured == pytest.approx(
                state.scores[entry.node.id] - state.scores[entry.reference]
            )


# --- the page ---


@pytest.mark.parametrize(
    "line",
    ["# </script><script>x</script>", "# <!-- <script>", "x = '\\u2028 \udc80 \x00 ‮'", "# &lt; &amp; ' \""],
)
def test_no_source_leaves_its_place_in_the_page(line: str) -> None:
    state = replay_events(ExampleSearch(batches=2, line=line).events())
    text = page(state)
    text.encode("utf-8")
    assert "connect-src 'none'" in unescape(text)
    assert text.count("<script") == text.count("</script>") == 2
    inside = text.partition('id="data">')[2].partition("</script>")[0]
    data = json.loads(inside)
    assert set(data["nodes"]) == set(state.nodes)
    best = data["nodes"][data["best"]]
    shown = data["sources"][best["source"]]
    assert shown == [
        figures.escape_invisible(s) for s in state.nodes[data["best"]].source.removesuffix("\n").split("\n")
    ]


def test_steps_turn_the_parents_source_into_the_nodes() -> None:
    state, story = story_of(ExampleSearch(batches=3))
    data = render_parts(story)["data"]
    checked = 0
    for node in data["nodes"].values():
        if node["steps"] is None:
            continue
        before, after = (data["sources"][n["source"]] for n in (data["nodes"][node["parent"]], node))
        made: list[str] = []
        for tag, i, i_end, j, j_end in node["steps"]:
            made += before[i:i_end] if tag == "equal" else after[j:j_end]
        assert made == list(after)
        checked += 1
    assert checked == len(state.nodes) - 1


def test_large_searches_are_bounded_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "MOST_NODES", 200)
    state, story = story_of(ExampleSearch(batches=15, line="\n".join(["#" * 5000] * 8)))
    assert len(state.nodes) > 200
    parts = render.render_parts(story)
    assert len(parts["data"]["nodes"]) == 200
    assert f"200 of {len(state.nodes)} nodes can be chosen" in parts["content"]
    texts = parts["data"]["sources"]
    assert 20 < len(texts) < 200
    assert f"the sources of {len(texts)} nodes" in parts["content"]
    assert sum(len(line) for text in texts for line in text) <= figures.MAX_CHARACTERS
    assert parts["data"]["nodes"][parts["data"]["best"]]["source"] >= 0


def test_a_refuted_finalist_is_told_apart() -> None:
    example = ExampleSearch(confirmed=False, stopped=False)
    events = list(example.events())
    state = replay_events(events)
    best = state.incumbent
    judged = NodeResult(
        Outcome.INCORRECT, state.seeds[0], stage="confirm", feedback="wrong with fresh inputs"
    )
    state = replay_events([*events, Confirmed({best: judged})])
    story = build_report(state)
    assert story.final.node != best
    rows = figures.finalist_rows(story, [])
    assert [(r.id, r.speedup, r.css) for r in rows] == [(best, "incorrect", "bad")]
    assert "but not confirmed" in render_parts(story)["data"]["nodes"][best]["result"]


def test_a_seed_under_torch_compile_is_shown_beside_it() -> None:
    events = list(ExampleSearch().events())
    (last,) = (e for e in events if isinstance(e, Confirmed))
    root = replay_events(events).seeds[0]
    seed = replay_events(events).judged[root]
    compiled = replace(seed, facts={"compiled": {n: s / 4 for n, s in seed.seconds.items()}})
    events[events.index(last)] = Confirmed({**last.judged, root: compiled})
    state = replay_events(events)
    rows = figures.finalist_rows(build_report(state), figures.workload_names(build_report(state)))
    assert (rows[-1].speedup, "torch.compile" in rows[-1].note, all(rows[-1].times)) == ("4.00x", True, True)
    assert "the seed under torch.compile: 4.00x" in dict(summary_lines(state))["best"]


def test_problems_are_counted() -> None:
    events: list[Any] = list(ExampleSearch(batches=2, stopped=False, confirmed=False).events())
    state = replay_events(events)
    events = [
        Forecasted(e.batch, e.reference, {}, problem="no server answers") if isinstance(e, Forecasted) else e
        for e in events
    ]
    assert not build_report(state).problems
    story = build_report(replay_events(events))
    assert story.problems == {"forecasts: no server answers": 2}
    assert "no server answers <b>(2 times)</b>" in render_parts(story)["content"]


def test_the_last_lines_name_the_gain_and_its_price() -> None:
    told = dict(summary_lines(replay_events(ExampleSearch().events())))
    assert re.fullmatch(r"\d\.\d\dx over the seed, 95 % interval \S+ to \S+, confirmed in .*", told["best"])
    assert "measurements" in told["spent"]
    assert "per percent" in told["cost"]
    assert told["ended"] == "finished: measurements 200 of 200 spent"
    nothing = dict(
        summary_lines(
            replay_events(e for e in ExampleSearch(batches=0, confirmed=False, stopped=False).events())
        )
    )
    assert nothing["best"] == "no source but the seed has run"


# --- what a search says of the language models that were named ---


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


# --- the live view and the server ---


def watched(example: ExampleSearch) -> tuple[list[str], list[str]]:
    """The lines while the search of an example went on, and where it stood after each event."""
    output, state, stages = Output(False), SearchState(), []
    output.errors = Console(file=io.StringIO(), width=110, color_system=None)
    live = LiveDisplay(output)
    for event in example.events():
        live(apply_event(state, event))
        stages.append(output.stage)
    assert isinstance(output.errors.file, io.StringIO)
    return output.errors.file.getvalue().splitlines(), stages


# --- the view ---


def test_a_pipe_gets_a_line_per_batch_and_per_better_node() -> None:
    state = replay_events(ExampleSearch().events())
    found, _ = watched(ExampleSearch())
    assert not any("\x1b" in line for line in found)
    records = [
        p for a, p in zip([0.0, *(p.best for p in state.history)], state.history, strict=False) if p.best < a
    ]
    assert sum("the best so far" in line for line in found) == len(records)
    assert sum(", batch " in line for line in found) == max(state.batches)


def test_the_stage_is_where_the_search_stands_and_its_costs() -> None:
    state = replay_events(ExampleSearch().events())
    *_, stage = watched(ExampleSearch())[1]
    spent = (f"{len(state.history)} of 200", f"{state.spent.tokens:,} of 2,000,000")
    for part in ("finished: measurements 200 of 200 spent", *spent):
        assert part in stage


def test_names_are_no_markup_and_no_control_sequences() -> None:
    example = ExampleSearch(batches=1, name="[red]x[/red]\x1b]0;owned\x07")
    text = " ".join(itertools.chain(*watched(example)))
    assert "[red]x[/red]" in text
    assert "owned" in text
    assert "\x1b]0" not in text


def test_failures_say_why_in_the_line() -> None:
    text = " ".join(watched(ExampleSearch(batches=1, failing=1.0, stopped=False))[1])
    assert any(word in text for word in ("compile error error:", "incorrect wrong:", "timeout no answer"))
