"""Runs Python and our command line in processes of their own, and reads what commands print."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

Capture = pytest.CaptureFixture[str]


def shown(capture: Capture) -> dict[str, Any]:
    """The one JSON object on stdout."""
    data = json.loads(capture.readouterr().out)
    assert isinstance(data, dict)
    return data


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False, **options
    )


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return python("-m", "forecast_autotune", *arguments, **options)
