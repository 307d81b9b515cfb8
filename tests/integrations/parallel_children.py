"""Tasks in forked children, all at once: importable by programs that tests start."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from forecast_integrations.triton.compile.children import NICE, ForkedChildren


def run_in_children(
    tasks: Sequence[Callable[[], object]], timeout_s: float, nice: int = NICE
) -> Iterator[Any]:
    """Run all tasks at once, a child each; yield the answers as they come, none for a task that failed.

    Tasks for which no child can be started, or that take longer than `timeout_s`, yield nothing. A child's own
    children yield to it no further with `nice` 0.
    """
    children = ForkedChildren(nice)
    try:
        for task in tasks:
            with contextlib.suppress(OSError):
                children.start(task, task)
        limit = time.perf_counter() + timeout_s
        while len(children) and time.perf_counter() < limit:
            for child, _ in children.finished(0.25)[0]:
                with contextlib.suppress(ValueError):
                    yield child.answer()
    finally:
        children.close()
