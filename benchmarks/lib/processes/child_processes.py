"""Fresh processes of benchmark scripts: their environment, their command lines, what they print."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import ROOT

_REMOVED_VARIABLES = (
    "TRITON_CACHE_DIR",
    "TRITON_CACHE_AUTOTUNING",
    "TRITON_INTERPRET",
    "TRITON_PRINT_AUTOTUNING",
)
"""Variables of the caller that must not reach a child; all of ours, too."""


def child_environment(folder: Path, **more: str) -> dict[str, str]:
    """The caller's environment with Triton's cache and our store below `folder`, and `more` on top."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in _REMOVED_VARIABLES and not k.startswith("FORECAST_AUTOTUNE")
    }
    paths = filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))
    fresh = {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "FORECAST_AUTOTUNE_CACHE_DIR": str(folder / "store"),
        # A child may run in another folder, where a relative path leads to what happens to be installed.
        "PYTHONPATH": os.pathsep.join([str(ROOT), *map(os.path.abspath, paths)]),
    }
    return {**kept, **fresh, **more}


def module_command(script: str) -> list[str]:
    """How a script starts itself: as a module of the repository, by its path from elsewhere."""
    path = Path(script).resolve()
    if not path.is_relative_to(ROOT):
        return [sys.executable, str(path)]
    return [sys.executable, "-m", ".".join(path.relative_to(ROOT).with_suffix("").parts)]


def child_command(script: str, arguments: argparse.Namespace, role: str, given: Any = None) -> list[str]:
    """How this script starts itself in a role; `given` is what the child gets as `arguments.given`."""
    command = [*module_command(script), "--child", role, "--given", json.dumps(given or {})]
    return command + (["--null"] if arguments.null else [])


def run_child(command: Sequence[str], env: Mapping[str, str], timeout_s: float = 300.0) -> dict[str, Any]:
    """Run a child to its end; returns the JSON object it printed last. Raises when it fails or hangs."""
    done = subprocess.run(
        command, env=dict(env), stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=True
    )
    return last_object(done.stdout)


def last_object(text: str) -> dict[str, Any]:
    """The last line that is a JSON object. Raises `ValueError` if there is none."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not lines:
        raise ValueError(f"the child printed no JSON object, but {text[-400:]!r}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result
