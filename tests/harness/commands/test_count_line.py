"""The line of counts that a command shows while it works."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

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


def test_quiet_shows_nothing() -> None:
    file = io.StringIO()
    with CountLine(Console(file=file), lambda: "2 of 2", quiet=True):
        pass
    assert file.getvalue() == ""
