"""The line of counts that a command shows while it works."""

from __future__ import annotations

import io
import threading
import time

import pytest
from rich.console import Console

from forecast_harness.commands import count_line
from forecast_harness.commands.count_line import CountLine


@pytest.mark.parametrize("terminal", [True, False])
def test_counts_are_shown_at_once_and_at_the_end(terminal: bool) -> None:
    file = io.StringIO()
    told = ["none of 2 judged"]
    with CountLine(Console(file=file, force_terminal=terminal, width=60), lambda: told[-1]):
        assert "none of 2 judged" in file.getvalue()
        told.append("2 of 2 \x1b[31mjudged")
    shown = file.getvalue()
    assert "2 of 2" in shown
    assert "\x1b[31m" not in shown
    assert ("\r" in shown) is terminal
    assert shown.endswith("\n")
    assert all(t.name != "count-line" for t in threading.enumerate())


def test_a_log_shows_that_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count_line, "_PIPE_INTERVAL_S", 0.01)
    file = io.StringIO()
    with CountLine(Console(file=file), lambda: "none of 2 judged"):
        while file.getvalue().count("\n") < 3:
            time.sleep(0.01)
    first, *later = file.getvalue().splitlines()
    assert first == "none of 2 judged"
    assert later[0] == "none of 2 judged (0 s)", "the seconds, where nothing else changed"


def test_quiet_shows_nothing() -> None:
    file = io.StringIO()
    with CountLine(Console(file=file), lambda: "2 of 2", quiet=True):
        pass
    assert file.getvalue() == ""
