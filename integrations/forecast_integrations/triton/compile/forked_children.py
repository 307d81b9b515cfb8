"""Forked children that each do one task and answer in JSON.

A child shares nothing with its parent but a copy of its memory: the parent's interpreter stays free,
and a task that aborts or hangs costs only its child. A child never touches the device, and leaves by
`os._exit`, because the parent's buffers and device context are not its own to tear down.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from forecast_integrations.triton.compile.child_process import fork_task, kill_group, write_whole
from forecast_integrations.triton.compile.dispatcher import NICE, Dispatcher

T = TypeVar("T")


@dataclass(frozen=True)
class DispatchedTask:
    """A task as a dispatcher knows it: by name, with its argument."""

    dispatcher: Dispatcher
    name: str
    argument: object = None


@dataclass(eq=False)
class ForkedChild:
    """One running child, and what it has said so far."""

    tag: Any
    began: float
    pid: int = 0
    """0 where a dispatcher has forked it."""
    pipe: int = -1
    dispatcher: Dispatcher | None = None
    number: int = -1
    """What its dispatcher calls it."""
    received: bytearray = field(default_factory=bytearray)
    refusal: str = ""
    """Why its dispatcher could start no child; empty where it could."""
    hung: bool = False
    """Whether its dispatcher has ended it for doing nothing, or hangs itself."""

    def answer(self) -> Any:
        """What the task returned. Raises `ValueError` when the child died before it could say."""
        return json.loads(self.received)


class ForkedChildren:
    """The running children of one owner, who must `close` it."""

    def __init__(self, nice: int = NICE) -> None:
        """`nice` is how much further children yield than whoever starts them."""
        self._nice = nice
        self._running: list[ForkedChild] = []

    def __len__(self) -> int:
        return len(self._running)

    def start(
        self, tag: object, task: Callable[[], object], dispatched: DispatchedTask | None = None
    ) -> None:
        """Run `task` in a child; its result must be JSON-able. Raises `OSError` when none can be had.

        The same task as a dispatcher's is `dispatched` instead, unless the dispatcher is gone.
        """
        if dispatched is not None:
            number = dispatched.dispatcher.start(dispatched.name, dispatched.argument)
            if number is not None:
                child = ForkedChild(tag, time.perf_counter(), dispatcher=dispatched.dispatcher, number=number)
                self._running.append(child)
                return
        pid, pipe = fork_task(lambda pipe: write_whole(pipe, json.dumps(task()).encode()), self._nice)
        self._running.append(ForkedChild(tag, time.perf_counter(), pid, pipe))

    def finished(self, timeout_s: float) -> tuple[list[tuple[ForkedChild, int]], bool]:
        """Listen for at most `timeout_s`: children that ended, with their wait status, and whether
        anybody said anything."""
        ended = self._dispatched_answers()
        forked = {child.pipe: child for child in self._running if child.dispatcher is None}
        dispatchers = {id(d): d for child in self._running if (d := child.dispatcher) is not None}
        poll = select.poll()
        for descriptor in (*forked, *(fd for d in dispatchers.values() for fd in d.descriptors())):
            poll.register(descriptor, select.POLLIN)
        readable = [descriptor for descriptor, _ in poll.poll(0 if ended else 1000 * timeout_s)]
        for pipe in readable:
            if pipe in forked:
                block = os.read(pipe, 1 << 16)
                forked[pipe].received += block
                if not block:
                    ended.append((forked[pipe], self._forget(forked[pipe])))
        for dispatcher in dispatchers.values():
            dispatcher.listen()
        ended += self._dispatched_answers()
        return ended, bool(readable or ended)

    def running(self) -> list[ForkedChild]:
        """Children that have not ended, or have not been heard to."""
        return list(self._running)

    def overdue(self, seconds: float) -> list[ForkedChild]:
        """Children that have been running for longer than that."""
        limit = time.perf_counter() - seconds
        return [child for child in self._running if child.began < limit]

    def kill(self, child: ForkedChild) -> None:
        """End a child and everything it has started."""
        if child.dispatcher is not None:
            child.dispatcher.kill(child.number)
            self._running.remove(child)
            return
        kill_group(child.pid)
        self._forget(child)

    def close(self) -> None:
        """Kill what still runs. A dispatcher is closed by its own owner."""
        for child in list(self._running):
            self.kill(child)

    def _dispatched_answers(self) -> list[tuple[ForkedChild, int]]:
        """Children whose dispatchers have heard of their end, with their wait status."""
        ended = []
        for child in list(self._running):
            if child.dispatcher is None or (answer := child.dispatcher.take(child.number)) is None:
                continue
            child.received += answer.text.encode()
            child.refusal, child.hung = answer.refusal, answer.hung
            self._running.remove(child)
            ended.append((child, answer.status))
        return ended

    def _forget(self, child: ForkedChild) -> int:
        self._running.remove(child)
        os.close(child.pipe)
        try:
            return os.waitpid(child.pid, 0)[1]
        except ChildProcessError:  # a host that reaps every child itself (SIGCHLD ignored)
            return 0


def answers_of_children(
    answer: Callable[[Sequence[T]], object], shares: Sequence[Sequence[T]], timeout_s: float
) -> list[Any]:
    """What `answer` says of each share, each asked in a child of its own and given as JSON has it.

    None for a share whose child cannot be had, dies, or has not answered after `timeout_s` seconds.
    """
    found: list[Any] = [None] * len(shares)
    children = ForkedChildren()
    dispatcher = Dispatcher({"share": lambda i: answer(shares[i])}, len(shares))
    until = time.perf_counter() + timeout_s
    try:
        for i, share in enumerate(shares):
            with suppress(OSError):
                children.start(i, partial(answer, share), DispatchedTask(dispatcher, "share", i))
        while len(children) and (left := until - time.perf_counter()) > 0:
            for child, _ in children.finished(left)[0]:
                with suppress(ValueError):
                    found[child.tag] = child.answer()
    finally:
        children.close()
        dispatcher.close()
    return found
