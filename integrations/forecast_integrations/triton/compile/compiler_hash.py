"""Triton's hash of its own files, computed once for all compile children.

Every key of Triton's cache begins with it, and the first compilation of a process reads the whole compiler
(400 to 500 MB) for it: 0.2 to 0.6 s. A thread computes it from the first decorated kernel on, and has mostly done so
when that is launched. Where it has not begun by then, one child computes it and leaves it in shared memory for the
others. Only children, which are ours, are told: this process asks Triton itself, so that a wrong hash could cost a
second compilation and never select a wrong binary.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import threading
import time
from typing import Any

from forecast_integrations.triton.compile.dispatcher import Dispatcher
from forecast_integrations.triton.compile.forked_children import DispatchedTask, ForkedChildren

_BYTES = 1 << 16
"""Room for the text: a version and 64 hex digits for each of Triton's source files."""
_COMPUTING, _KNOWN, _FAILED = 0, 1, 2
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Of NVIDIA's driver, AMD's, and either in a virtual machine of Windows: without any, nothing will be compiled."""
_WAIT_S = 2.0
"""A child that waited this long computes the hash itself."""


class CompilerHash:
    """The hash of this process' Triton."""

    def __init__(self) -> None:
        self._children: ForkedChildren | None = None
        self._shared: mmap.mmap | None = None
        """One byte of state and four of length before the text."""
        self._owner = 0
        self._early: threading.Thread | None = None

    def start_early(self) -> None:
        """Begin computing it in a thread, once per process; reading and digesting hold no lock of the interpreter.

        Nothing happens without a GPU's driver.
        """
        if self._early is None and any(map(os.path.exists, _DEVICE_FILES)):
            thread = threading.Thread(target=self._compute_early, name="compiler-hash", daemon=True)
            with contextlib.suppress(RuntimeError):  # no room for another thread
                thread.start()
                self._early = thread

    def _compute_early(self) -> None:
        with contextlib.suppress(Exception):  # it fails again where it is needed
            self._publish(_module().triton_key())

    def _is_under_way(self) -> bool:
        return self._early is not None and self._early.is_alive()

    def start(self, dispatcher: Dispatcher | None = None) -> None:
        """Begin computing it in a child, unless this process knows it or has begun.

        A `dispatcher` must know `compute` as its task `hash`.
        """
        if self._owner == os.getpid() or _is_known():
            return
        self._owner = os.getpid()
        self._children = None  # a forked process' copy of its parent's: not its own to wait for
        with contextlib.suppress(OSError):
            self._shared = mmap.mmap(-1, _BYTES)
            if self._is_under_way():
                if _is_known():  # the thread may have found nobody to tell
                    self._publish(_module().triton_key())
                return
            self._children = ForkedChildren()
            dispatched = DispatchedTask(dispatcher, "hash") if dispatcher is not None else None
            self._children.start("hash", self.compute, dispatched)

    def adopt(self) -> None:
        """In a compile child: wait for the hash, and have Triton use it here."""
        shared = self._shared
        if shared is None or _is_known():
            return
        limit = time.perf_counter() + _WAIT_S
        while shared[0] == _COMPUTING and time.perf_counter() < limit:
            time.sleep(0.001)
        if shared[0] == _KNOWN:
            end = 5 + int.from_bytes(shared[1:5], "little")
            text = shared[5:end].decode()
            setattr(_module(), "triton_key", lambda: text)  # noqa: B010 Triton's own workers do the same

    def settle(self) -> None:
        """Have this process know it as well, from Triton itself."""
        if self._early is not None:
            self._early.join()
        text = _module().triton_key()
        if self._shared is not None:
            self._publish(text)  # whoever still waits for the child need not
        self.stop()

    def stop(self) -> None:
        """Give up what is being computed. Children that have not adopted it yet must be gone."""
        if self._children is not None and self._owner == os.getpid():
            self._children.close()
        self._children = self._shared = None
        self._owner = 0

    def compute(self) -> None:
        """In a child: compute it, and leave it where others find it."""
        try:
            self._publish(_module().triton_key())
        finally:
            if self._shared is not None and self._shared[0] == _COMPUTING:
                self._shared[0] = _FAILED

    def _publish(self, text: str) -> None:
        data = text.encode()
        if self._shared is None or self._shared[0] != _COMPUTING or len(data) > _BYTES - 5:
            return
        self._shared[1:5] = len(data).to_bytes(4, "little")
        self._shared[5 : 5 + len(data)] = data
        self._shared[0] = _KNOWN


def _module() -> Any:
    """Where Triton looks the function up when it makes a key."""
    for name in ("triton.runtime.cache", "triton.compiler.compiler"):  # from 3.5 on, and 3.4
        module = importlib.import_module(name)
        if hasattr(module, "triton_key"):
            return module
    raise ImportError("this Triton has no `triton_key`: versions 3.4 to 3.9 do")


def _is_known() -> bool:
    """Whether this process has computed the hash (or this Triton has none that can be handed over)."""
    try:
        return bool(_module().triton_key.cache_info().currsize)
    except (AttributeError, ImportError):
        return True


COMPILER_HASH = CompilerHash()
"""This process' own."""
