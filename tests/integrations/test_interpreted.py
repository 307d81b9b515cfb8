"""Runs `interpreted/` in a process of its own, where triton is imported with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]


def test_interpreted_folder(capsys: pytest.CaptureFixture[str]) -> None:
    """Every test of `interpreted/` passes, for Triton's decorator and for ours."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/integrations/interpreted",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    with capsys.disabled():
        print(
            f"\ninterpreted: {done.stdout.strip().splitlines()[-1] if done.stdout.strip() else 'no output'}"
        )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
