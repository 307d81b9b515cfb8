"""What README and quickstart show of a replay is what it prints, but for its seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@cache
def printed() -> str:
    done = subprocess.run(
        [sys.executable, "-m", "forecast_autotune", "replay"],
        capture_output=True,
        check=True,
        text=True,
        env=os.environ | {"COLUMNS": "116", "PYTHONIOENCODING": "utf-8"},
    )
    return " ".join(done.stdout.split())


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
@pytest.mark.parametrize("row", ["measured", "regret"])
def test_a_summary_that_is_shown_is_printed(page: str, row: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    shown = [line.strip("│ ").split() for line in text.splitlines() if line.startswith(f"│ {row} ")]
    if page == "README.md":
        assert shown
    for words in shown:
        assert " ".join(words) in printed()
