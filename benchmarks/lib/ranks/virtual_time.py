"""Simulated processes on a virtual clock: real code in threads of which one runs at a time, in a fixed order.

Nothing waits in real time. A process gives way wherever it sleeps; the one whose time comes next goes on.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable


class SimulatedKillError(BaseException):
    """Ends a simulated process at once: no `except Exception` of the code under test stops it."""


class VirtualProcess:
    """One simulated process."""

    def __init__(self) -> None:
        self.killed = self.ended = False
        self.error: Exception | None = None
        """What its work raised."""
        self.go = threading.Semaphore(0)
        self.wakes = 0
        """How often it was told when to go on: of several times, the latest counts."""


class VirtualTime:
    """Runs simulated processes, and is their clock."""

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, VirtualProcess | None, int, Callable[[], None] | None]] = []
        self._order = itertools.count()
        self._back = threading.Semaphore(0)
        self._running: VirtualProcess | None = None

    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Give way for so many virtual seconds; called by a simulated process."""
        process = self._running
        assert process is not None
        if process.killed:
            raise SimulatedKillError
        self._wake(process, self._now + max(0.0, seconds))
        self._back.release()
        process.go.acquire()
        if process.killed:
            raise SimulatedKillError

    def start(self, process: VirtualProcess, work: Callable[[], None], at: float) -> None:
        """Let a process begin its work at a moment."""
        thread = threading.Thread(target=self._run_process, args=(process, work), daemon=True)
        thread.start()
        self._wake(process, at)

    def call_at(self, at: float, act: Callable[[], None]) -> None:
        """Call something that does not sleep at a moment."""
        heapq.heappush(self._events, (at, next(self._order), None, 0, act))

    def kill(self, process: VirtualProcess) -> None:
        """End a process now; what it does on its way out reaches nobody."""
        process.killed = True
        self._wake(process, self._now)

    def run(self) -> None:
        """Until every process has ended. Raises the first error of a process."""
        while self._events:
            self._now, _, process, wake, act = heapq.heappop(self._events)
            if act is not None:
                act()
            elif process is not None and not process.ended and wake == process.wakes:
                self._running = process
                process.go.release()
                self._back.acquire()
                self._running = None
                if process.error is not None:
                    raise process.error

    def _wake(self, process: VirtualProcess, at: float) -> None:
        process.wakes += 1
        heapq.heappush(self._events, (at, next(self._order), process, process.wakes, None))

    def _run_process(self, process: VirtualProcess, work: Callable[[], None]) -> None:
        process.go.acquire()
        try:
            if not process.killed:
                work()
        except SimulatedKillError:
            pass
        except Exception as error:
            process.error = error
        finally:
            process.ended = True
            self._back.release()
