"""Compile in forked children: the parent's interpreter stays free, and a bad config costs only its child.

A child never touches the device, and leaves by `os._exit`: the parent's buffers and device context are
not its own to tear down.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import selectors
import signal
import statistics
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from forecast_autotune.records import Candidate, Outcome
from forecast_integrations.call import outcome_of
from forecast_integrations.compiled import Compiled

_NICE = 5
"""Children yield to the parent, whose launches are being timed."""
_STRAGGLER = 5.0
"""A compilation that takes this many times the median has usually unrolled or spilled without bounds,
and makes a slow kernel: an impatient pool does not wait for it ..."""
_STRAGGLER_S = 6.0
"""... unless everything compiles quickly: this many seconds are always granted."""


@dataclass
class _Child:
    candidate: Candidate
    pid: int
    pipe: int
    began: float
    received: bytearray = field(default_factory=bytearray)


class ForkPool:
    """One forked child per compilation, at most `workers` at a time."""

    quiet = True

    def __init__(
        self, compile_one: Callable[[Candidate], Any], workers: int, timeout_s: float, patient: bool = True
    ) -> None:
        """`timeout_s` is the most a compilation may take; an impatient pool gives up earlier."""
        self.compile_s = 0.0
        self.finished = 0
        self._patient = patient
        self._seconds: list[float] = []
        self._compile, self._workers, self._timeout_s = compile_one, workers, timeout_s
        self._waiting: deque[Candidate] = deque()
        self._submitted: set[Candidate] = set()
        self._children: dict[int, _Child] = {}
        self._unstarted: deque[Compiled] = deque()
        self._selector = selectors.DefaultSelector()
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def submit(self, candidates: Sequence[Candidate]) -> None:
        """Queue candidates not submitted before; starts as many as there are free workers."""
        fresh = [c for c in dict.fromkeys(candidates) if c not in self._submitted]
        self._submitted.update(fresh)
        self._waiting.extend(fresh)
        self._fill()

    def next(self) -> Compiled:
        """Wait for a child; one that exceeds the timeout is killed and counts as hung."""
        while True:
            self._fill()
            if self._unstarted:
                return self._unstarted.popleft()
            if heard := self._selector.select(timeout=0.25):
                if (result := self._listen(self._children[heard[0][0].fd])) is not None:
                    return result
                # Only a silent child can hang: others may have waited long for us to listen.
                continue
            most = self._most()
            limit = time.perf_counter() - most
            for child in list(self._children.values()):
                if child.began < limit:
                    self._kill(child)
                    message = f"TimeoutError: not compiled after {most:.3g} s"
                    return Compiled(child.candidate, most, Outcome.TIMEOUT, message)

    def _most(self) -> float:
        """Seconds that a compilation may take by now."""
        if self._patient or len(self._seconds) < 3:
            return self._timeout_s
        return min(self._timeout_s, max(_STRAGGLER_S, _STRAGGLER * statistics.median(self._seconds)))

    def done(self) -> list[Compiled]:
        """Collect the children that have finished by now."""
        found = list(self._unstarted)
        self._unstarted.clear()
        while heard := self._selector.select(timeout=0):
            found += [r for key, _ in heard if (r := self._listen(self._children[key.fd])) is not None]
        return found

    def _listen(self, child: _Child) -> Compiled | None:
        """Take what a child has to say; its result once it has closed its end."""
        block = os.read(child.pipe, 1 << 16)
        child.received += block
        return None if block else self._reap(child)

    def close(self) -> None:
        """Kill the children: what they were compiling is not wanted any more."""
        self._waiting.clear()
        for child in list(self._children.values()):
            self._kill(child)
        self._selector.close()

    def _fill(self) -> None:
        while self._waiting and len(self._children) < self._workers:
            candidate = self._waiting.popleft()
            try:
                self._start(candidate)
            except OSError as error:  # no more processes, memory or descriptors: not the candidate's fault
                message = f"no child could be started: {error}"
                self._unstarted.append(Compiled(candidate, 0.0, Outcome.INFRASTRUCTURE, message))

    def _start(self, candidate: Candidate) -> None:
        inward, outward = os.pipe()
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python 3.12 warns of forking with threads; see the module's docstring for what the child avoids.
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
                os.write(outward, json.dumps(self._attempt(candidate)).encode())
                code = 0
            finally:
                # Not sys.exit: the parent's buffers and its device context are not ours to tear down.
                os._exit(code)
        os.close(outward)
        self._children[inward] = _Child(candidate, pid, inward, time.perf_counter())
        self._selector.register(inward, selectors.EVENT_READ)

    def _settle_in(self, parent: int) -> None:
        gc.disable()
        os.setpgid(0, 0)  # so that a kill reaches ptxas as well
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if self._libc is not None:
            self._libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent
            if os.getppid() != parent:
                os._exit(1)
        with contextlib.suppress(OSError):
            os.nice(_NICE)

    def _attempt(self, candidate: Candidate) -> dict[str, Any]:
        begin = time.perf_counter()
        answer: dict[str, Any] = {}
        try:
            self._compile(candidate)
        except BaseException as error:
            outcome = outcome_of(error)
            answer = {
                "outcome": outcome and str(outcome),
                "message": f"{type(error).__name__}: {error}"[:2000],
            }
        return {**answer, "seconds": time.perf_counter() - begin}

    def _reap(self, child: _Child) -> Compiled:
        status = self._forget(child)
        seconds = time.perf_counter() - child.began
        result = Compiled(child.candidate, seconds)
        try:
            answer = json.loads(child.received)
        except ValueError:
            # It died without a word: an abort inside the compiler, unless somebody else (the kernel
            # when memory is short, say) killed it.
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {status >> 8}"
            aborted = os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL
            result.outcome = Outcome.COMPILE_ERROR if aborted else Outcome.INFRASTRUCTURE
            result.message = f"the compiler died ({how})"
            return result
        result.seconds = float(answer["seconds"])
        self._seconds.append(result.seconds)
        self.compile_s += result.seconds
        self.finished += 1
        if "outcome" not in answer:
            return result
        result.message = answer["message"]
        if answer["outcome"] is None:
            # The caller's mistake: repeat it here, where the user sees it with its own traceback.
            try:
                self._compile(child.candidate)
            except BaseException as error:
                result.error = error
            return result
        outcome = Outcome(answer["outcome"])
        result.outcome = Outcome.COMPILE_ERROR if outcome is Outcome.RUNTIME_ERROR else outcome
        return result

    def _kill(self, child: _Child) -> None:
        for target in (os.killpg, os.kill):
            with contextlib.suppress(OSError):
                target(child.pid, signal.SIGKILL)
        self._forget(child)

    def _forget(self, child: _Child) -> int:
        self._selector.unregister(child.pipe)
        del self._children[child.pipe]
        os.close(child.pipe)
        try:
            return os.waitpid(child.pid, 0)[1]
        except ChildProcessError:  # a host that reaps every child itself (SIGCHLD ignored)
            return 0
