"""Runs `interpreted/` in a process of its own, where triton is imported with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_interpreted_folder() -> None:
    """Every test of `interpreted/` passes, for Triton's decorator and for ours."""
    options = ["tests/integrations/interpreted", "-q", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
