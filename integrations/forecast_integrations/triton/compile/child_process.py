"""What every process forked here does first, and how one is started and ended."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import signal
import sys
import threading
import warnings
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

from forecast_integrations.triton.compile.deferred_signals import deferred_signals

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_SHOWN_WARNINGS = mmap.mmap(-1, 1 << 16)
"""A byte for each hash of a warning, set by the first child that shows it: all forks share this memory."""


def fork_process() -> int:
    """As `os.fork`, without Python 3.12's warning of threads; no handler of a signal runs within it.

    A fork holds its caller up while the page tables are copied: about 10 ms per 2 GB in use. Raises `OSError` when no
    process can be had, and what a handler raises: then the child is ended.
    """
    pid = -1
    try:
        with deferred_signals():
            pid = _fork()
    except BaseException:
        if pid == 0:
            os._exit(1)
        if pid > 0:
            kill_group(pid)
            os.waitpid(pid, 0)
        raise
    return pid


def _fork() -> int:
    if threading.current_thread() is not threading.main_thread():
        # Filters of warnings are one for all threads: those of the main thread are not to be put back here.
        return os.fork()
    with warnings.catch_warnings():
        # What was forked runs no other thread's code, and leaves by `os._exit`.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def fork_task(write: Callable[[int], None], nice: int) -> tuple[int, int]:
    """Fork a child that calls `write(pipe)` and leaves; its pid and the pipe's other end, for the caller to read.

    The child leaves with status 0, or 1 if `write` raised. Raises `OSError` when no process can be had.
    """
    inward, outward = os.pipe()
    parent = os.getpid()
    try:
        pid = fork_process()
    except BaseException:
        os.close(inward)
        os.close(outward)
        raise
    if pid == 0:
        code = 1
        try:
            os.close(inward)
            settle_in(parent, nice)
            write(outward)
            code = 0
        finally:
            os._exit(code)
    os.close(outward)
    return pid, inward


def settle_in(parent: int, nice: int) -> None:
    """In a process just forked by `parent`: be in reach of a kill, die with the parent, yield to it by `nice`."""
    gc.disable()
    _show_warnings_once()
    os.setpgid(0, 0)  # so that a kill reaches ptxas as well
    signal.set_wakeup_fd(-1)  # an event loop of the parent's is not to wake up for a signal here
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    if nice:
        with contextlib.suppress(OSError):
            os.nice(nice)


def _show_warnings_once() -> None:
    """Have this child show no warning that another has shown: each compiles a config of the same kernel."""
    show = warnings.showwarning
    if getattr(show, "func", None) is not _show_first:  # unless it was forked by one that has settled in
        warnings.showwarning = partial(_show_first, show)


def _show_first(
    show: Callable[..., None],
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    *rest: Any,
    **named: Any,
) -> None:
    said = f"{filename}:{lineno}: {category.__name__}: {message}".encode(errors="replace")
    slot = zlib.crc32(said) % len(_SHOWN_WARNINGS)
    if not _SHOWN_WARNINGS[slot]:
        _SHOWN_WARNINGS[slot] = 1
        show(message, category, filename, lineno, *rest, **named)


def kill_group(pid: int) -> None:
    """End a child that was not waited for, and everything that it has started. Never raises."""
    for target in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            target(pid, signal.SIGKILL)


def write_whole(pipe: int, data: bytes) -> None:
    """Write all of `data`, however often the pipe is full. Raises `OSError` when nobody can read it."""
    while data:
        data = data[os.write(pipe, data) :]
