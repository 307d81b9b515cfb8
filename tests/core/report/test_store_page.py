"""The store's page: what is on it, and what hostile text becomes."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html.parser import HTMLParser

from forecast_autotune.report.store_page import (
    MOST_PROBLEMS,
    MOST_REASONS,
    ProblemRow,
    render_store_page,
)
from forecast_autotune.testing import example_table
from tests.core.report.store_rows import HOSTILE, overview, problem_row

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)


class Tags(HTMLParser):
    """The tags of a page, and the text of its table cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data


def test_a_page_says_what_is_known_and_why() -> None:
    page = render_store_page(overview(problem_row(1), problem_row(2, risk=None, median_ms=None)), NOW)
    cells = Tags(page).cells
    assert {"kernel_1", "64 float16", "NVIDIA H200", "measured", "9 of 72, 1 failed", "40.0 s"} <= set(cells)
    assert "2 steps9 of 72: the best by expected gain" in "".join(cells)
    assert {"kernel_1", "kernel_2"} == set(
        re.findall(r"<b>(kernel_\d)</b> NVIDIA H200<br>1 ms to 2 ms; 1 of 2", page)
    )
    assert [tag for tag, _ in Tags(page).tags].count("circle") == 4
    for text in ("3.2 MB", "in 42 files", "88 % of 120 first measurements", "15 %", "/a/store"):
        assert text in page


def test_an_empty_store_has_a_page() -> None:
    page = render_store_page(overview(reliability=[], intervals={"n": 0, "covered": None}), NOW)
    assert "The store holds nothing yet" in page
    assert "No stated risk was checked yet" in page
    assert "<table" not in page
    assert "<svg" not in page


def test_nothing_of_a_store_becomes_markup() -> None:
    texts = dict.fromkeys(("kernel", "key", "device", "evidence", "chosen", "at"), HOSTILE)
    row = problem_row(3, **texts, reasons=(HOSTILE, HOSTILE * 100))
    page = render_store_page(overview(row, remarks=[HOSTILE] * 30), NOW)
    tags = Tags(page)
    named = [tag for tag, _ in tags.tags]
    assert named.count("script") == 1
    assert named.count("style") == 1
    assert "img" not in named
    assert not [a for _, attributes in tags.tags for a in attributes if a.startswith("on")]
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert len(page) < 60_000, "text is bounded"
    assert "and 20 more" in page


def test_a_page_loads_nothing_and_lets_nothing_else_run() -> None:
    page = render_store_page(overview(problem_row()), NOW)
    policy = next(a["content"] for tag, a in Tags(page).tags if a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert not re.findall(r"""(?:src|href)=["'](?!data:,)""", page)
    assert "http://" not in page
    assert "https://" not in page


def test_more_problems_than_a_page_holds_are_counted() -> None:
    rows = [problem_row(i) for i in range(MOST_PROBLEMS + 7)]
    result = overview(*rows)
    assert (len(result.rows), result.problems) == (MOST_PROBLEMS, MOST_PROBLEMS + 7)
    assert result.rows[0].at == max(row.at for row in rows)
    page = render_store_page(result, NOW)
    assert "7 older ones are left out" in page
    assert len(page) < 10_000_000


def test_a_row_of_measurements_without_a_decision() -> None:
    table = example_table()
    row = ProblemRow.of(table.problem, table.measurements, None)
    assert (row.evidence, row.measured) == ("undecided", len(table.by_candidate()))
    assert row.median_ms == min(m.ms for m in table.by_candidate().values() if m.ok)
    assert row.risk is None
    assert len(ProblemRow.of(table.problem, (), None).reasons) <= MOST_REASONS
