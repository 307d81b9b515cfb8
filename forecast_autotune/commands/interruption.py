"""How a command ends when it is asked to: Ctrl-C, SIGTERM and SIGHUP alike, with everything cleaned up."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

ENDING_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
IGNORED_AFTER_S = 1.0
"""Seconds after a signal in which further ones count as the same wish: they would only break the cleaning up."""
_RAISED_AGAIN_S = 0.01
_DEFAULT_HANDLERS = (signal.SIG_DFL, signal.default_int_handler)


class CommandInterrupted(KeyboardInterrupt):
    """A signal that asks the command to end; a `KeyboardInterrupt`, so that all are handled alike."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class InterruptHandlers:
    """Inside of the `with` block, a signal that asks to end raises `CommandInterrupted` in the main thread.

    Only signals that still have their default effect are taken: `nohup` ignores SIGHUP, and that stays so. A
    process forked in the block has the defaults again.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        """The number of the first signal."""
        self._at = 0.0
        self._owner = os.getpid()
        self._before: dict[int, Any] = {}
        self._hook: Any = None
        self._is_noting = self._came_meanwhile = False

    def __enter__(self) -> InterruptHandlers:
        global _active
        if threading.current_thread() is threading.main_thread():
            if hasattr(os, "register_at_fork"):
                _register_fork_hooks()
            _active = self
            self._hook, sys.unraisablehook = sys.unraisablehook, self._note_swallowed
            for number in ENDING_SIGNALS:
                if (before := signal.getsignal(number)) in _DEFAULT_HANDLERS:
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Put the handlers back that were there before."""
        global _active
        _active = None if _active is self else _active
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}
        if self._hook is not None:
            sys.unraisablehook, self._hook = self._hook, None

    def restore_defaults(self) -> None:
        """In a forked child: a signal ends it, as it would end any other process."""
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_noting:  # what is raised now would be swallowed, too
            self._came_meanwhile = True
            return
        now = time.monotonic()
        if self.received is not None and now - self._at < IGNORED_AFTER_S:
            return
        self.received = number if self.received is None else self.received
        self._at = now
        raise CommandInterrupted(number)

    def _note_swallowed(self, args: UnraisableHookArgs) -> None:
        """Raise an interrupt again that came while Python could not hand it on: in a finalizer, for example."""
        if not isinstance(args.exc_value, CommandInterrupted):
            self._hook(args)
            return
        self._at = -IGNORED_AFTER_S
        later_s, self._came_meanwhile = _RAISED_AGAIN_S, True
        while self._came_meanwhile:
            self._is_noting, self._came_meanwhile = True, False
            again = threading.Timer(later_s, os.kill, (self._owner, args.exc_value.number))
            again.daemon = True
            again.start()
            self._is_noting, later_s = False, 2.0 * later_s + 0.001


_active: InterruptHandlers | None = None
"""The handlers in force."""


@cache
def _register_fork_hooks() -> None:
    """Give forked children the default handlers before any signal can reach them.

    Python forgets signals that a child gets while it is being made, so they are blocked until then.
    """

    def block() -> None:
        if _active is not None:
            signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)

    def unblock() -> None:
        if _active is not None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)

    def restore_and_unblock() -> None:
        if _active is not None:
            _active.restore_defaults()
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=restore_and_unblock)


def die_by_default() -> None:
    """From here on a signal ends this process at once: nothing is left to clean up, or nothing begun.

    Python's own handler would print a traceback out of whatever runs then: imports, or the interpreter's end.
    """
    if threading.current_thread() is threading.main_thread():
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) in _DEFAULT_HANDLERS:
                with contextlib.suppress(OSError):
                    signal.signal(number, signal.SIG_DFL)


def restore_python_handler() -> None:
    """Let Ctrl-C raise `KeyboardInterrupt` again, as Python does by itself."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGINT, signal.default_int_handler)
