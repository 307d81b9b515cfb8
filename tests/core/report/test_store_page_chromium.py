"""The store's page as a real browser shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.report.store_page import render_store_page
from tests.browser import LOW_CONTRAST_SCRIPT, PageVisit, chromium
from tests.core.report.store_rows import HOSTILE, overview, problem_row


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as result:
        yield result


def written(folder: Path, problems: int) -> str:
    """Address of a page of that many problems and one more, which is hostile and the latest."""
    file = folder / "store.html"
    hostile = dict.fromkeys(("kernel", "key", "device", "chosen"), HOSTILE)
    rows = [problem_row(i) for i in range(problems)]
    result = overview(*rows, problem_row(3000, **hostile, at="2026-12-01", reasons=(HOSTILE,)))
    file.write_text(render_store_page(result), encoding="utf-8")
    return file.as_uri()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("page"), 99)


def column(visit: PageVisit, name: str) -> list[str]:
    """Texts of the rows that are shown, in their order."""
    heads = visit.tab.eval_on_selector_all("#problems thead th", "all => all.map(h => h.textContent)")
    cells = f"#problems tbody tr:not([hidden]) td:nth-child({heads.index(name) + 1})"
    results: list[str] = visit.tab.eval_on_selector_all(cells, "all => all.map(c => c.textContent)")
    return results


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_is_quiet_alone_and_readable(browser: Any, small: str, dark: bool) -> None:
    visit = PageVisit(browser, small, dark=dark)
    assert visit.messages == []
    assert visit.requested_urls == [small]
    assert visit.tab.evaluate("window.hacked") is None
    assert len(column(visit, "kernel")) == 100
    paper = visit.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
    assert visit.tab.evaluate("document.documentElement.scrollWidth") == 1280
    visit.tab.fill("#filter", "kernel_1 ")
    visit.tab.locator("tr:not([hidden]) summary").first.click()
    assert visit.tab.evaluate(LOW_CONTRAST_SCRIPT) == []
    visit.tab.close()


def test_the_keyboard_sorts_and_filters(browser: Any, small: str) -> None:
    visit = PageVisit(browser, small)
    head = visit.tab.locator("#problems th", has_text="its time")
    head.locator("button").focus()
    visit.tab.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    smallest = column(visit, "its time")
    visit.tab.keyboard.press("Space")
    assert head.get_attribute("aria-sort") == "descending"
    largest = column(visit, "its time")
    assert smallest[0] == "10 µs"
    assert largest == sorted(largest, key=lambda text: -float(text.removesuffix(" ms").replace(" µs", "e-3")))
    assert sorted(smallest) == sorted(largest)

    visit.tab.keyboard.press("Shift+Tab")
    visit.tab.locator("#problems th button", has_text="kernel").focus()
    visit.tab.keyboard.press("Enter")
    names = [name for name in column(visit, "kernel") if name.startswith("kernel_")]
    assert names == sorted(names, key=lambda name: int(name.removeprefix("kernel_")))
    assert visit.tab.locator("[aria-sort]").count() == 1

    visit.tab.fill("#filter", "KERNEL_36")
    assert set(column(visit, "kernel")) == {"kernel_36"}
    assert "of 100 are shown" in visit.tab.inner_text("#count")
    visit.tab.fill("#filter", "")
    assert len(column(visit, "kernel")) == 100
    assert visit.messages == []
    visit.tab.close()


def test_two_thousand_problems_load_and_sort(browser: Any, tmp_path: Path) -> None:
    visit = PageVisit(browser, written(tmp_path, 2000))
    assert len(column(visit, "kernel")) == 2001
    visit.tab.locator("#problems th button", has_text="its time").click()
    assert column(visit, "its time")[0] == "10 µs"
    assert visit.messages == []
    visit.tab.close()


def test_a_narrow_window_shows_it_without_scrolling_sideways(browser: Any, small: str) -> None:
    visit = PageVisit(browser, small)
    visit.tab.set_viewport_size({"width": 390, "height": 844})
    assert visit.tab.evaluate("document.documentElement.scrollWidth") == 390
    shown = visit.tab.eval_on_selector_all(
        "#problems thead th", "all => all.filter(h => h.checkVisibility()).map(h => h.textContent)"
    )
    assert shown == ["kernel", "key", "its time", "age", "why"]
    visit.tab.close()


def test_hostile_text_is_shown_as_it_is(browser: Any, small: str) -> None:
    visit = PageVisit(browser, small)
    assert visit.tab.locator("main script, main img").count() == 0
    hostile = column(visit, "kernel")[0]  # the latest
    assert hostile.startswith("</script></style><script>window.hacked")
    visit.tab.evaluate(
        "document.querySelector('#problems').insertAdjacentHTML('beforeend', `<img src=x onerror='window.hacked = 1'>`)"
    )
    visit.tab.wait_for_timeout(50)
    assert visit.tab.evaluate("window.hacked") is None, "the policy keeps handlers from running"
    visit.tab.close()
