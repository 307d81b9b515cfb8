"""The same kernel on other device classes: which of their logs are worth reading before a decision."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from forecast_autotune.store.similarity import nearness_key

if TYPE_CHECKING:
    from forecast_autotune.records import Problem
    from forecast_autotune.store.directory import KernelDirectory
    from forecast_autotune.surrogates.protocol import Relative

DEVICES = 8
"""At most so many other device classes are looked at."""
BYTES = 4 * 1024 * 1024
"""Their logs together are no larger than this: about a twentieth of a second per MiB, once per process."""


def affordable_directories(root: Path, kernel: str, own: str) -> list[Path]:
    """Directories of a kernel on devices other than `own`, by name, within `DEVICES` and `BYTES`.

    `kernel` and `own` are directory names; a directory whose logs are too large is passed over. Raises
    `OSError` where `root` cannot be listed.
    """
    found: list[Path] = []
    left = BYTES
    for path in sorted(root.glob(f"*/{kernel}")):
        if path.parent.name == own or len(found) == DEVICES:
            continue
        size = sum(map(_size, path.glob("log-*.jsonl")))
        if 0 < size <= left:
            found.append(path)
            left -= size
    return found


def _size(log: Path) -> int:
    # What is no regular file is not read.
    return log.stat().st_size if log.is_file() else 0


def nearest_relatives(problem: Problem, directories: Iterable[KernelDirectory]) -> list[Relative]:
    """Of each device class the most similar problem of the very same source that ran, nearest first.

    Nothing where the source is not known: times of another kernel must not pass for this one's.
    """
    from forecast_autotune.surrogates.protocol import Relative

    made: list[Relative] = []
    source = problem.kernel.source_sha256
    for directory in directories:
        same = [p for p in directory.problems().values() if source and p.kernel.source_sha256 == source]
        for other in sorted(same, key=lambda p: nearness_key(problem, p)):
            rows = tuple(directory.measurements(other.id))
            if any(m.ok for m in rows):
                made.append(Relative(other, rows))
                break
    made.sort(key=lambda r: nearness_key(problem, r.problem))
    return made
