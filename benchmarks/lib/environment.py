"""The origin of a result, as its file says: device, versions, date, seed, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
"""The repository's."""


def environment(seed: int | None = None) -> dict[str, Any]:
    """Facts that make a figure reproducible, of a run with torch and Triton."""
    import torch
    import triton

    result = host_environment(seed) | {"torch": torch.__version__, "triton": triton.__version__}
    if torch.cuda.is_available():
        result["device"] = torch.cuda.get_device_name()
    return result


def host_environment(seed: int | None = None) -> dict[str, Any]:
    """Facts that make a figure reproducible, of a run on the CPU without torch and Triton."""
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "device": "cpu",
        "commit": commit_id(),
    }
    return result if seed is None else {**result, "seed": seed}


def commit_id() -> str:
    """The checkout's commit, with a mark for uncommitted changes; an environment variable may give it."""
    if given := os.environ.get("BENCHMARK_COMMIT"):
        return given
    try:
        name = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+changes" if dirty else "")
