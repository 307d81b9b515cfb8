"""Handlers of signals wait while a process is forked."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = tuple(sorted(map(int, signal.valid_signals())))


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Have the program's handlers of signals run after the block, in the order in which the signals came.

    Python runs a handler at the next line of Python in the main thread. While it forks, that is a hook, such as the
    one by which `logging` takes its lock and lets it go. What a handler raises there, `KeyboardInterrupt` as well, is
    printed and forgotten, and the lock stays taken: every other thread that logs or imports then waits for ever.

    Raises what a handler raises, after the block. Does nothing in other threads, where no handler runs. In a process
    forked within the block the handlers are the program's again, and what came before is the parent's affair.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    handlers = {n: handler for n in _SIGNALS if callable(handler := signal.getsignal(n))}
    process = os.getpid()
    raised: BaseException | None = None
    try:
        for number in handlers:
            signal.signal(number, note)
        yield
    finally:
        if os.getpid() != process:
            came.clear()
        while True:
            try:
                for number, handler in handlers.items():
                    if signal.getsignal(number) is note:  # else a hook of the fork has put another there
                        signal.signal(number, handler)
                while came:
                    signal.raise_signal(came.pop(0))
                break
            except BaseException as error:  # of a handler that is back: the others have to be, too
                raised = raised or error
        if raised is not None:
            raise raised
