"""What a dispatcher's processes do: start children on request, and pass their answers on.

Between two processes go frames: four bytes of length, then the content. A request is a pickled tuple, `("start",
number, task, argument)` or `("kill", number)`; both ends run the same program, one being the other's fork. An
answer is an `Answer`, as JSON with the child's own JSON in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from forecast_integrations.triton.compile.child_process import (
    fork_process,
    fork_task,
    kill_group,
    settle_in,
    write_whole,
)
from forecast_integrations.triton.compile.hung_processes import HungProcesses

_LENGTH = struct.Struct("!I")
_BLOCK = 1 << 16
_REAP_S = 0.05
"""Children that have answered take milliseconds to give their memory back; they are looked for so often."""
_WATCH_S = 1.0
"""Seconds between two looks for children that hang."""
_GREETING = -1
"""The number of the answer that each process gives to nobody, to show that it has begun."""


@dataclass(frozen=True)
class Answer:
    """How one child ended."""

    number: int
    text: str = ""
    """The task's result in JSON; empty where the child died before it could say, or never lived."""
    status: int = 0
    """The wait status of a child without a text."""
    refusal: str = ""
    """Why no child could be started; empty where one was."""
    hung: bool = False
    """Whether it was ended for doing nothing."""


@dataclass
class FrameReader:
    """Cuts a stream of bytes into frames."""

    received: bytearray = field(default_factory=bytearray)

    def frames(self, block: bytes) -> list[bytes]:
        """The contents of the frames that are whole with this block."""
        self.received += block
        found = []
        while len(self.received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self.received)[0]
            if len(self.received) < end:
                break
            found.append(bytes(self.received[_LENGTH.size : end]))
            del self.received[:end]
        return found


def frame(content: bytes) -> bytes:
    """The content with its length before it."""
    return _LENGTH.pack(len(content)) + content


def run_dispatcher(
    ends: Sequence[socket.socket], tasks: Mapping[str, Callable[[Any], object]], nice: int
) -> None:
    """In the dispatcher's process: become as many processes as there are ends, and serve each end.

    Returns, in every one of them, when the other end was shut down and all children are gone.
    """
    # Those that exist fork side by side: two rounds make four.
    first, last, forked = 0, len(ends), list[int]()
    while last - first > 1:
        middle = (first + last + 1) // 2
        parent = os.getpid()
        pid = fork_process()
        if pid == 0:
            settle_in(parent, 0)
            first, forked = middle, []
        else:
            forked.append(pid)
            last = middle
    for i, end in enumerate(ends):
        if i != first:
            end.close()
    # A host may have its children reaped by the kernel; here their wait status is wanted.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _DispatcherLoop(ends[first], tasks, nice).run()
    for pid in forked:
        os.waitpid(pid, 0)


@dataclass
class _Child:
    """A running child of a dispatcher's process."""

    number: int
    pid: int
    pipe: int
    reader: FrameReader = field(default_factory=FrameReader)


class _DispatcherLoop:
    """One process of a dispatcher. It never waits for whoever listens, nor for a child."""

    def __init__(self, end: socket.socket, tasks: Mapping[str, Callable[[Any], object]], nice: int) -> None:
        self._end, self._tasks, self._nice = end, tasks, nice
        self._children: dict[int, _Child] = {}
        self._ending: set[int] = set()
        """Pids of children that have answered or were killed."""
        self._outgoing = bytearray()
        self._requests = FrameReader()
        self._hung = HungProcesses()
        self._watch_at = time.monotonic() + _WATCH_S
        self._selector = selectors.DefaultSelector()
        self._selector.register(end, selectors.EVENT_READ)
        end.setblocking(False)

    def run(self) -> None:
        """Serve until the other end was shut down; then end all children."""
        with contextlib.suppress(OSError):  # nobody listens any more
            self._answer(Answer(_GREETING))
            while self._serve():
                pass
        pids = self._ending | {child.pid for child in self._children.values()}
        for pid in pids:
            kill_group(pid)
        for pid in pids:
            os.waitpid(pid, 0)

    def _serve(self) -> bool:
        """Wait for something to do and do it. False when the other end is gone."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        self._selector.modify(self._end, events)
        wait = _REAP_S if self._ending else _WATCH_S if self._children else None
        for key, mask in self._selector.select(wait):
            if key.fileobj is not self._end:
                self._listen(key.data)
                continue
            if mask & selectors.EVENT_WRITE:
                self._send()
            if mask & selectors.EVENT_READ:
                block = self._end.recv(_BLOCK)
                if not block:
                    return False
                for content in self._requests.frames(block):
                    self._obey(*pickle.loads(content))
        self._ending = {pid for pid in self._ending if os.waitpid(pid, os.WNOHANG)[0] == 0}
        self._end_hung()
        return True

    def _end_hung(self) -> None:
        if time.monotonic() < self._watch_at:
            return
        self._watch_at = time.monotonic() + _WATCH_S
        hung = self._hung.among([child.pid for child in self._children.values()])
        for child in [one for one in self._children.values() if one.pid in hung]:
            kill_group(child.pid)
            self._forget(child)
            self._answer(Answer(child.number, status=signal.SIGKILL, hung=True))

    def _obey(self, verb: str, number: int, *details: Any) -> None:
        if verb == "start":
            try:
                self._start(number, *details)
            except OSError as error:
                self._answer(Answer(number, refusal=str(error)))
        elif (child := self._children.get(number)) is not None:
            kill_group(child.pid)
            self._forget(child)

    def _start(self, number: int, task: str, argument: object) -> None:
        def write_answer(pipe: int) -> None:
            self._end.close()
            self._selector.close()
            write_whole(pipe, frame(json.dumps(self._tasks[task](argument)).encode()))

        pid, pipe = fork_task(write_answer, self._nice)
        child = self._children[number] = _Child(number, pid, pipe)
        self._selector.register(pipe, selectors.EVENT_READ, child)

    def _listen(self, child: _Child) -> None:
        if child.number not in self._children:
            return  # it was killed in this round
        block = os.read(child.pipe, _BLOCK)
        texts = child.reader.frames(block)
        if texts:
            # Without waiting for its end: what it has used takes milliseconds to free.
            self._forget(child)
            self._answer(Answer(child.number, texts[0].decode()))
        elif not block:
            self._forget(child)
            self._ending.discard(child.pid)
            self._answer(Answer(child.number, status=os.waitpid(child.pid, 0)[1]))

    def _forget(self, child: _Child) -> None:
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        del self._children[child.number]
        self._ending.add(child.pid)

    def _answer(self, answer: Answer) -> None:
        self._outgoing += frame(json.dumps(asdict(answer)).encode())
        self._send()

    def _send(self) -> None:
        with contextlib.suppress(BlockingIOError):  # even a socket that was said to be writable may be full
            del self._outgoing[: self._end.send(self._outgoing)]
