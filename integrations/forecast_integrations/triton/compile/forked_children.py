"""Forked children that each do one task and answer in JSON.

A child shares nothing with its parent but a copy of its memory: the parent's interpreter stays free,
and a task that aborts or hangs costs only its child. A child never touches the device, and leaves by
`os._exit`, because the parent's buffers and device context are not its own to tear down.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import selectors
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_NICE = 5
"""Children yield to the parent, whose launches are being timed."""


@dataclass
class ForkedChild:
    """One running child, and what it has said so far."""

    tag: Any
    pid: int
    pipe: int
    began: float
    received: bytearray = field(default_factory=bytearray)

    def answer(self) -> Any:
        """What the task returned. Raises `ValueError` when the child died before it could say."""
        return json.loads(self.received)


class ForkedChildren:
    """The running children of one owner, who must `close` it."""

    def __init__(self, nice: int = _NICE) -> None:
        """`nice` is how much further children yield than whoever starts them."""
        self._nice = nice
        self._running: dict[int, ForkedChild] = {}
        self._selector = selectors.DefaultSelector()
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def __len__(self) -> int:
        return len(self._running)

    def start(self, tag: object, task: Callable[[], object]) -> None:
        """Run `task` in a child; its result must be JSON-able. Raises `OSError` when none can be had."""
        inward, outward = os.pipe()
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python 3.12 warns of forking with threads; see the module's docstring for what a child avoids.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                pid = os.fork()
            except OSError:
                os.close(inward)
                os.close(outward)
                raise
        if pid == 0:
            code = 1
            try:
                os.close(inward)
                self._settle_in(parent)
                _write(outward, json.dumps(task()).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(outward)
        self._running[inward] = ForkedChild(tag, pid, inward, time.perf_counter())
        self._selector.register(inward, selectors.EVENT_READ)

    def finished(self, timeout_s: float) -> tuple[list[tuple[ForkedChild, int]], bool]:
        """Listen for at most `timeout_s`: children that ended, with their wait status, and whether
        anybody said anything."""
        ended: list[tuple[ForkedChild, int]] = []
        readable = self._selector.select(timeout=timeout_s)
        for key, _ in readable:
            child = self._running[key.fd]
            block = os.read(child.pipe, 1 << 16)
            child.received += block
            if not block:
                ended.append((child, self._forget(child)))
        return ended, bool(readable)

    def running(self) -> list[ForkedChild]:
        """Children that have not ended, or have not been heard to."""
        return list(self._running.values())

    def overdue(self, seconds: float) -> list[ForkedChild]:
        """Children that have been running for longer than that."""
        limit = time.perf_counter() - seconds
        return [child for child in self._running.values() if child.began < limit]

    def kill(self, child: ForkedChild) -> None:
        """End a child and everything it has started."""
        for target in (os.killpg, os.kill):
            with contextlib.suppress(OSError):
                target(child.pid, signal.SIGKILL)
        self._forget(child)

    def close(self) -> None:
        """Kill what still runs."""
        for child in list(self._running.values()):
            self.kill(child)
        self._selector.close()

    def _settle_in(self, parent: int) -> None:
        gc.disable()
        os.setpgid(0, 0)  # so that a kill reaches ptxas as well
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if self._libc is not None:
            self._libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent
            if os.getppid() != parent:
                os._exit(1)
        with contextlib.suppress(OSError):
            os.nice(self._nice)

    def _forget(self, child: ForkedChild) -> int:
        self._selector.unregister(child.pipe)
        del self._running[child.pipe]
        os.close(child.pipe)
        try:
            return os.waitpid(child.pid, 0)[1]
        except ChildProcessError:  # a host that reaps every child itself (SIGCHLD ignored)
            return 0


def run_in_children(
    tasks: Sequence[Callable[[], object]], timeout_s: float, nice: int = _NICE
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


def _write(pipe: int, data: bytes) -> None:
    while data:
        data = data[os.write(pipe, data) :]
