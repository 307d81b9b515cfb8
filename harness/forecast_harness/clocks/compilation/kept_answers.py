"""Answers of compile cells on a user's own sources, kept between processes: each search begins with the same ones.

Of what candidates' cells answer nothing is kept. What is read is checked as a cell's own answer would be.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Collection, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forecast_autotune.store.files import write_atomically
from forecast_harness.sandbox.jobs import JobResult, JobStatus, SandboxError, SandboxJob, TensorBytes

_MOST_FILES, _MOST_BYTES = 256, 32 << 20
"""That are kept, and of one answer."""
_TOOLS = ("triton", "torch", "numpy")
_PACKAGES = ("forecast_autotune", "forecast_integrations", "forecast_harness")
"""Whose code runs in compile cells."""


class KeptAnswers:
    """A folder of answers, one file each, JSON only. Any thread and process may ask; what is damaged is not there."""

    def __init__(self, folder: Path, sources: Collection[str]) -> None:
        """`sources`: whose answers are kept; those that import what a user may change are left out."""
        self._folder, self._sources = folder, {s for s in sources if imports_tools_only(s)}
        self._version = _version() if self._sources else ""

    def keeps(self, source: str) -> bool:
        """Whether answers on this source are kept."""
        return source in self._sources

    def get(self, job: SandboxJob) -> JobResult | None:
        """The answer to the same job, where one is kept."""
        if not self._is_kept(job):
            return None
        try:
            told = json.loads(self._path(job).read_text(encoding="utf-8"))
            arrays = {
                n: TensorBytes(a["dtype"], tuple(a["shape"]), base64.b64decode(a["data"], validate=True))
                for n, a in told["arrays"].items()
            }
            return JobResult(JobStatus.OK, value=told["value"], arrays=arrays, seconds=0.0)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SandboxError):
            return None

    def put(self, job: SandboxJob, result: JobResult) -> None:
        """Keep an answer, where it is one of those that are kept; a folder that cannot be written to keeps none."""
        if result.status is not JobStatus.OK or not self._is_kept(job):
            return
        arrays = {
            n: {"dtype": a.dtype, "shape": list(a.shape), "data": base64.b64encode(a.data).decode()}
            for n, a in result.arrays.items()
        }
        payload = json.dumps({"value": result.value, "arrays": arrays}).encode()
        if len(payload) <= _MOST_BYTES:
            with contextlib.suppress(OSError):
                write_atomically(self._path(job), payload)
                self._forget_oldest()

    def _is_kept(self, job: SandboxJob) -> bool:
        return bool(job.files) and all(text in self._sources for text in job.files.values())

    def _path(self, job: SandboxJob) -> Path:
        told = json.dumps([self._version, job.entry, dict(job.payload), dict(job.files)], sort_keys=True)
        return self._folder / f"{hashlib.sha256(told.encode()).hexdigest()}.json"

    def _forget_oldest(self) -> None:
        files = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in files[_MOST_FILES:]:
            path.unlink(missing_ok=True)


def imports_tools_only(source: str) -> bool:
    """Whether a source imports nothing that a user may change: its text says what it does, then."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    allowed = {*_TOOLS, *sys.stdlib_module_names}
    return all(name.partition(".")[0] in allowed for name in _imported(tree))


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "" if node.level else node.module or ""


def _version() -> str:
    """What else an answer depends on: the tools, their settings, and our own code."""
    found: list[Any] = [sys.version]
    for tool in _TOOLS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append([tool, metadata.version(tool)])
    found.append(sorted((n, v) for n, v in os.environ.items() if n.startswith("TRITON_")))
    for package in _PACKAGES:
        if (spec := find_spec(package)) is None or spec.origin is None:
            continue
        for path in sorted(Path(spec.origin).parent.rglob("*.py")):
            state = path.stat()
            found.append([str(path), state.st_size, state.st_mtime_ns])
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()
