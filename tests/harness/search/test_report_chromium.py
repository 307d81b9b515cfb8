"""The report and the live page as a real browser shows them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forecast_harness.search.report import page
from forecast_harness.search.state import SearchState, replay_events
from tests.browser import LOW_CONTRAST_SCRIPT, PageVisit, chromium
from tests.harness.search.example_log import ExampleSearch

HOSTILE = "# </script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'> ‮ 世界 \\u003c"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def written(folder: Path, example: ExampleSearch) -> tuple[SearchState, str]:
    """A report on disk: the state it tells of, and its address."""
    state = replay_events(example.events())
    file = folder / "report.html"
    file.write_text(page(state), encoding="utf-8")
    return state, file.as_uri()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(
    "example",
    [
        ExampleSearch(),
        ExampleSearch(batches=0, confirmed=False, stopped=False),
        ExampleSearch(batches=1, parents=1, samples=1, k=1),
        ExampleSearch(failing=1.0),
        ExampleSearch(forecasts=False, confirmed=False),
        ExampleSearch(batches=2, name="naïve </script><b>世界</b>", line=HOSTILE),
    ],
    ids=["usual", "only the seed", "one node", "all fail", "no forecasts", "hostile"],
)
def test_a_report_is_quiet_alone_and_readable(
    browser: Any, tmp_path: Path, example: ExampleSearch, dark: bool
) -> None:
    state, url = written(tmp_path, example)
    visit = PageVisit(browser, url, dark=dark)
    picture = tmp_path / ("dark.png" if dark else "light.png")
    visit.tab.screenshot(path=picture)
    assert picture.stat().st_size > 10_000
    assert visit.messages == []
    assert visit.requested_urls == [url]
    assert visit.tab.inner_text("h1") == f"Search of {example.name}"
    assert visit.tab.evaluate("document.documentElement.scrollWidth") == 1280
    assert visit.tab.evaluate(LOW_CONTRAST_SCRIPT) == []
    assert visit.tab.evaluate("window.hacked") is None
    assert visit.chosen() == (state.best if len(state.scores) > 1 else state.seeds[0])
    assert visit.tab.evaluate("getComputedStyle(document.body).colorScheme") == "light dark"
    paper = visit.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
    visit.tab.close()


@pytest.mark.slow
def test_two_thousand_nodes_fit(browser: Any, tmp_path: Path) -> None:
    state, url = written(tmp_path, ExampleSearch(batches=63, samples=16))
    assert len(state.nodes) > 2000
    assert (tmp_path / "report.html").stat().st_size < 8_000_000
    visit = PageVisit(browser, url)
    assert visit.messages == []
    assert visit.tab.eval_on_selector_all("#tree [data-node]", "all => all.length") == 400
    assert f"400 of {len(state.nodes):,} nodes are listed" in visit.tab.inner_text("main")
    assert visit.chosen() == state.best
    visit.tab.close()


def test_a_click_shows_a_nodes_difference_to_its_parent(browser: Any, tmp_path: Path) -> None:
    state, url = written(tmp_path, ExampleSearch())
    visit = PageVisit(browser, url)
    node = next(
        n for n in state.nodes.values() if n.parents and state.judged.get(n.id) and n.id != state.best
    )
    parent = state.nodes[node.parents[0]]
    visit.tab.locator(f"#tree [data-node='{node.id}']").click()
    assert visit.chosen() == node.id
    assert visit.heading().startswith(f"#{list(state.nodes).index(node.id)}:")
    shown = visit.tab.eval_on_selector_all(".code td.added", "all => all.map(td => td.textContent)")
    gone = visit.tab.eval_on_selector_all(".code td.removed", "all => all.map(td => td.textContent)")
    assert set(shown) == set(node.source.splitlines()) - set(parent.source.splitlines())
    assert set(gone) == set(parent.source.splitlines()) - set(node.source.splitlines())
    for word in (node.arm, "Belief before it ran", "P(better)", str(state.judged[node.id].outcome)):
        assert word in visit.tab.inner_text("#node")

    visit.tab.get_by_role("button", name="Side by side").click()
    assert visit.tab.locator(".code table.split td.added").count() == len(shown)
    assert visit.tab.get_by_role("button", name="Side by side").get_attribute("aria-pressed") == "true"
    visit.tab.get_by_role("button", name="Source", exact=True).click()
    lines = visit.tab.eval_on_selector_all(".code td:last-child", "all => all.map(td => td.textContent)")
    assert "\n".join(lines) == node.source.removesuffix("\n")
    assert visit.messages == []
    visit.tab.close()


def test_a_hostile_source_is_shown_as_it_is(browser: Any, tmp_path: Path) -> None:
    state, url = written(tmp_path, ExampleSearch(batches=2, line=HOSTILE))
    visit = PageVisit(browser, url)
    visit.tab.get_by_role("button", name="Source", exact=True).click()
    text = visit.tab.inner_text(".code")
    assert HOSTILE.replace("‮", "\\u{202e}") in text  # the override is spelled out, not obeyed
    assert visit.tab.evaluate("window.hacked") is None
    assert visit.tab.locator("#node script, #node img").count() == 0
    assert state.best == visit.chosen()
    visit.tab.close()
