"""The script that shows that decorated calls survive a faulty server: a short run of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_decorated_calls_are_correct_whatever_the_server_does(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.llm.server_faults",
        "--faults",
        "15",
        "--calls",
        "9",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    summary = json.loads(out.read_text())["summary"]
    assert summary["decorated_calls"]["correct"] == 9
    assert summary["faults"] > 45
    assert not any(summary["bad"].values())
    assert {"crashes", "hangs", "rows_wrong", "wrong_results", "keys_shown"} <= set(summary["bad"])
