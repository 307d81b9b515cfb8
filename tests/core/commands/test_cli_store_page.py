"""`show --page`."""

from __future__ import annotations

from pathlib import Path

import pytest

from forecast_autotune.commands import main
from forecast_autotune.commands.store_page import overview_of
from forecast_autotune.records.table import Table
from forecast_autotune.store import Store
from tests.core.captured_output import Capture, shown


def test_the_page_of_a_tuned_store(tuned: Table, root: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "page.html"
    assert main(["show", "--page", str(file), "--json"]) == 0
    assert shown(capsys) == {"page": str(file), "problems": 1}
    page = file.read_text(encoding="utf-8")
    (decided,) = [decision for _, decision in Store(root).decisions()]
    for text in (tuned.problem.kernel.name, str(decided.chosen), "first measurements fell inside"):
        assert text in page
    assert decided.rounds
    result = overview_of(Store(root))
    (row,) = result.rows
    assert row.reasons == tuple(dict.fromkeys((*decided.rounds, decided.reason)))
    assert (row.measured, row.risk, row.saved_s) == (decided.measured, decided.stated_risk, decided.saved_s)
    assert result.disk_bytes > 1000


def test_filters_choose_what_is_shown(tuned: Table, root: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["show", "--kernel", "no such", "--page", str(tmp_path / "page.html")]) == 0
    assert "0 problems" in capsys.readouterr().out
    assert "The store holds nothing yet" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "words",
    [["--page", "a.html", "--calibration"], ["--page", "absent/a.html"]],
)
def test_what_cannot_be_meant(root: Path, capsys: Capture, words: list[str]) -> None:
    assert main(["show", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
