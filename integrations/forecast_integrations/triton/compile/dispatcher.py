"""A process that forks children for this one, which pays for one fork only.

A fork holds its caller up while the page tables are copied: 20 ms in a process that has loaded CUDA and torch.
A decision with sixteen compilations would stand still for a third of a second; its dispatcher forks them while
it goes on. Children share the dispatcher's memory as it was when it was forked, at the first request.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from forecast_integrations.triton.compile.child_process import fork_process, kill_group, settle_in
from forecast_integrations.triton.compile.dispatcher_loop import (
    Answer,
    FrameReader,
    frame,
    run_dispatcher,
)
from forecast_integrations.triton.compile.hung_processes import HUNG_S

NICE = 5
"""Children yield to the main process, whose launches are being timed."""
_STARTS_PER_PROCESS = 4
_MAX_PROCESSES = 4
"""A dispatcher of one process starts sixteen children one after the other. Four become four in the time of two
forks, and start four each."""
_CLOSE_S = 5.0
"""Seconds that a dispatcher has for ending its children; it needs milliseconds."""


class Dispatcher:
    """Starts children that do one of the `tasks` each; its owner must `close` it.

    A task takes one argument, which can be pickled, and gives what JSON can hold.
    """

    def __init__(self, tasks: Mapping[str, Callable[[Any], object]], workers: int, nice: int = NICE) -> None:
        """About `workers` children run at once, and yield to this process by `nice`. Nothing is forked yet."""
        self._tasks, self._nice = tasks, nice
        self._processes = max(1, min(_MAX_PROCESSES, workers // _STARTS_PER_PROCESS))
        self._pid = 0
        self._owner = 0
        self._ends: list[tuple[socket.socket, FrameReader]] = []
        self._silent: set[socket.socket] = set()
        """Ends from which nothing has come so far, not even a greeting."""
        self._forked_at = 0.0
        self._outstanding: set[int] = set()
        self._answers: dict[int, Answer] = {}
        self._count = 0
        self._closed = False

    def start(self, task: str, argument: object) -> int | None:
        """Have a child do the task; the number by which its answer is asked for.

        None where this dispatcher cannot do it: it is gone, cannot be forked, or the argument cannot be pickled.
        """
        number = self._count
        try:
            request = frame(pickle.dumps(("start", number, task, argument)))
        except Exception:  # objects of the user's may fail in any way
            return None
        if self._closed:
            return None
        if not self._pid:
            try:
                self._fork()
            except OSError:
                self._closed = True
                return None
        self._count += 1
        if not self._send(number, request):
            return None
        self._outstanding.add(number)
        return number

    def kill(self, number: int) -> None:
        """End this child and everything that it has started; its answer does not come."""
        self._answers.pop(number, None)
        if number in self._outstanding:
            self._outstanding.discard(number)
            self._send(number, frame(pickle.dumps(("kill", number))))

    def take(self, number: int) -> Answer | None:
        """The answer of this child, once; None while there is none."""
        return self._answers.pop(number, None)

    def descriptors(self) -> list[int]:
        """What becomes readable when `listen` has something to hear."""
        return [end.fileno() for end, _ in self._ends]

    def listen(self) -> None:
        """Take in what was said, without waiting. Of a dispatcher that died all children are dead as well."""
        for end, reader in list(self._ends):
            if not self._hear(end, reader):
                self._give_up()
                return
        if self._silent and time.perf_counter() > self._forked_at + HUNG_S:
            self._give_up(hung=True)

    def close(self) -> None:
        """End all children, and the dispatcher. Returns at once: freeing their memory takes a tenth of a second."""
        self._closed = True
        if self._owner != os.getpid():  # a fork's copy: the dispatcher is its parent's
            for end, _ in self._ends:
                end.close()
            self._ends.clear()
            return
        for end, _ in self._ends:
            with contextlib.suppress(OSError):
                # Heard even if another process forked from this one holds a copy.
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._ends.clear()
        self._silent.clear()
        self._outstanding.clear()
        self._answers.clear()
        pid, self._pid = self._pid, 0
        if pid:
            try:
                threading.Thread(target=_reap, args=(pid,), name="reap-dispatcher", daemon=True).start()
            except RuntimeError:  # the interpreter ends, or there is no room for another thread
                _reap(pid)

    def _fork(self) -> None:
        pairs: list[tuple[socket.socket, socket.socket]] = []
        parent = os.getpid()
        try:
            pairs.extend(socket.socketpair() for _ in range(self._processes))
            pid = fork_process()
        except BaseException:
            for mine, other in pairs:
                mine.close()
                other.close()
            raise
        if pid == 0:
            code = 1
            try:
                settle_in(parent, 0)
                for mine, _ in pairs:
                    mine.close()
                run_dispatcher([other for _, other in pairs], self._tasks, self._nice)
                code = 0
            finally:
                os._exit(code)
        for _, other in pairs:
            other.close()
        self._pid, self._owner, self._forked_at = pid, parent, time.perf_counter()
        self._ends = [(mine, FrameReader()) for mine, _ in pairs]
        self._silent = {mine for mine, _ in pairs}

    def _send(self, number: int, request: bytes) -> bool:
        if not self._ends:
            return False
        try:
            self._ends[number % len(self._ends)][0].sendall(request)
        except OSError:
            self._give_up()
            return False
        return True

    def _hear(self, end: socket.socket, reader: FrameReader) -> bool:
        """Whether the process at the other end lives."""
        while True:
            try:
                block = end.recv(1 << 18, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not block:
                return False
            self._silent.discard(end)
            for content in reader.frames(block):
                answer = Answer(**json.loads(content))
                if answer.number in self._outstanding:  # it was not killed meanwhile
                    self._outstanding.discard(answer.number)
                    self._answers[answer.number] = answer

    def _give_up(self, *, hung: bool = False) -> None:
        """A process of the dispatcher's died or hangs: what was asked of it is lost, and the others are ended."""
        for end, reader in self._ends:
            self._hear(end, reader)
        lost, kept = self._outstanding, self._answers
        self._outstanding = set()
        self._answers = {}
        self.close()
        self._answers = kept | {number: Answer(number, status=signal.SIGKILL, hung=hung) for number in lost}


def _reap(pid: int) -> None:
    """Wait for a dispatcher that ends its children and then itself, and end it when it does not."""
    limit = time.perf_counter() + _CLOSE_S
    with contextlib.suppress(ChildProcessError):  # a host that reaps every child itself (SIGCHLD ignored)
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.perf_counter() > limit:
                kill_group(pid)
                os.waitpid(pid, 0)
                return
            time.sleep(0.001)
