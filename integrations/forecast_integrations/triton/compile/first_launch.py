"""What the first launch of a call's candidates needs besides their binaries, prepared while they compile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forecast_autotune.records import Candidate
from forecast_integrations.triton.compile.compiler_hash import COMPILER_HASH
from forecast_integrations.triton.compile.dispatcher import Dispatcher
from forecast_integrations.triton.compile.launcher_stubs import LauncherStubs
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.problem.source import innermost

CHILD_TASKS: Mapping[str, Callable[[Any], object]] = {
    "hash": lambda _: COMPILER_HASH.compute(),
}
"""What a dispatcher must know for a `FirstLaunch` to use it."""


class FirstLaunch:
    """The preparation of one call's launches, for the pool that compiles its candidates and must `close` it.

    Nothing here raises, and nothing depends on it: what is not prepared, the launch does itself.
    """

    def __init__(self, call: KernelCall, timeout_s: float, dispatcher: Dispatcher | None = None) -> None:
        """`timeout_s` is the most that a preparation may take; children are the dispatcher's."""
        self._call = call
        self._stubs = LauncherStubs(call, timeout_s)
        self._dispatcher = dispatcher
        self._idle_time_used = False

    def begin(self) -> None:
        """Begin, in a child, what every launch will need."""
        with contextlib.suppress(Exception):
            COMPILER_HASH.start(self._dispatcher)

    def start(self, candidates: Sequence[Candidate]) -> None:
        """Begin what launches of these candidates will need."""
        with contextlib.suppress(Exception):
            self._stubs.start(candidates)

    def enter_child(self) -> None:
        """In a compile child, before it compiles: use what other children have found out."""
        with contextlib.suppress(Exception):
            COMPILER_HASH.adopt()

    def use_idle_time(self) -> None:
        """While this process waits for binaries: compute what it needs to find them in Triton's cache."""
        if self._idle_time_used:
            return
        self._idle_time_used = True
        with contextlib.suppress(Exception):
            from triton.compiler.compiler import make_backend
            from triton.runtime.driver import driver

            COMPILER_HASH.settle()
            make_backend(driver.active.get_current_target()).hash()  # asks the assembler for its version
            _ = innermost(self._call.tuner.fn).cache_key  # reads the kernel and all that it calls

    def wait(self) -> None:
        """Wait until binaries can be launched without building anything more."""
        self._stubs.wait()

    def close(self) -> None:
        """Give up what is not ready; the children that compile must have ended."""
        self._stubs.close()
        COMPILER_HASH.stop()
