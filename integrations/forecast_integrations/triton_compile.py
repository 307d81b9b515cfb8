"""Compile candidates in parallel, without launching them: in forked children, or on threads.

Children are the default where the platform has `fork`: they do not share the interpreter lock, so the
parent times kernels undisturbed while they compile (with threads in one process, medians came out up
to thirty times too long), a compiler that aborts or hangs takes only its child along, and a child is
killed when nobody wants its result any more. The binary travels through Triton's own disk cache. A
child never touches the device: the driver it sees is a stand-in that only knows the target.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import queue
import selectors
import signal
import statistics
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from forecast_autotune.records import Candidate, Outcome
from forecast_integrations.call import outcome_of

_NICE = 5
"""Children yield to the parent, whose launches are being timed."""
_STRAGGLER = 5.0
"""A compilation that takes this many times the median has usually unrolled or spilled without bounds,
and makes a slow kernel: an impatient pool does not wait for it ..."""
_STRAGGLER_S = 6.0
"""... unless everything compiles quickly: this many seconds are always granted."""


@dataclass
class Compiled:
    """One finished compilation: a binary (in memory or in Triton's cache), or an outcome."""

    candidate: Candidate
    seconds: float = 0.0
    outcome: Outcome | None = None
    """None when it compiled."""
    message: str = ""
    error: BaseException | None = None
    """An error that is the caller's rather than the config's; to be raised."""


class CompilePool(Protocol):
    """What the measurer asks of either kind of pool."""

    quiet: bool
    """Whether timing is undisturbed while compilations run."""
    compile_s: float
    finished: int

    def submit(self, candidates: Sequence[Candidate]) -> None:
        """Queue candidates not submitted before, in order."""
        ...

    def next(self) -> Compiled:
        """Wait for the next finished (or given up) compilation."""
        ...

    def done(self) -> list[Compiled]:
        """Whatever has finished by now, without waiting."""
        ...

    def close(self) -> None:
        """Give up whatever is still queued or running."""
        ...


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


class ThreadPool:
    """Compile on daemon threads, where there is no `fork`. Timing has to wait until they are done.

    Daemon threads, because a compilation that hangs must not keep the interpreter from exiting (the
    threads of `concurrent.futures` are joined at exit).
    """

    quiet = False

    def __init__(
        self,
        compile_one: Callable[[Candidate], Any],
        workers: int,
        timeout_s: float,
        prepare: Callable[[], None],
    ) -> None:
        self.compile_s = 0.0
        self.finished = 0
        self._compile, self._workers, self._timeout_s = compile_one, workers, timeout_s
        self._prepare = prepare
        self._waiting: queue.SimpleQueue[Candidate | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
        self._running: dict[Candidate, float] = {}
        self._submitted: set[Candidate] = set()
        self._threads = 0
        self._closed = False

    def submit(self, candidates: Sequence[Candidate]) -> None:
        """Queue candidates not submitted before, in order."""
        for candidate in candidates:
            if candidate not in self._submitted:
                self._submitted.add(candidate)
                self._waiting.put(candidate)
                if self._threads < self._workers:
                    self._spawn()

    def next(self) -> Compiled:
        """Wait for a thread; one that exceeds the timeout is left behind and replaced."""
        while True:
            try:
                return self._done.get(timeout=0.25)
            except queue.Empty:
                limit = time.perf_counter() - self._timeout_s
            for candidate, began in list(self._running.items()):
                if began < limit and self._running.pop(candidate, None) is not None:
                    self._spawn()
                    message = f"TimeoutError: not compiled after {self._timeout_s:g} s"
                    return Compiled(candidate, self._timeout_s, Outcome.TIMEOUT, message)

    def done(self) -> list[Compiled]:
        """Collect what the threads have finished by now."""
        found: list[Compiled] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._done.get_nowait())
        return found

    def close(self) -> None:
        """Drop what has not started, and wait for what has: a compiler cannot be interrupted."""
        self._closed = True
        for _ in range(self._threads):
            self._waiting.put(None)
        limit = time.perf_counter() + self._timeout_s
        while self._running and time.perf_counter() < limit:
            time.sleep(0.01)

    def _spawn(self) -> None:
        self._threads += 1
        threading.Thread(target=self._work, name="forecast-compile", daemon=True).start()

    def _work(self) -> None:
        try:
            self._prepare()
        except Exception as error:
            while (candidate := self._waiting.get()) is not None and not self._closed:
                message = f"a compile thread could not select the device: {error}"
                self._done.put(Compiled(candidate, 0.0, Outcome.INFRASTRUCTURE, message))
            return
        while (candidate := self._waiting.get()) is not None and not self._closed:
            begin = self._running[candidate] = time.perf_counter()
            result = Compiled(candidate)
            try:
                self._compile(candidate)
            except BaseException as error:
                outcome = outcome_of(error)
                result.message = f"{type(error).__name__}: {error}"[:2000]
                result.outcome = Outcome.COMPILE_ERROR if outcome is Outcome.RUNTIME_ERROR else outcome
                result.error = error if outcome is None else None
            result.seconds = time.perf_counter() - begin
            if self._running.pop(candidate, None) is None:
                continue  # left behind as hung: its outcome is already recorded
            self.compile_s += result.seconds
            self.finished += 1
            self._done.put(result)


class _Target:
    """The driver a forked child sees: it knows what to compile for, and nothing else."""

    def __init__(self, active: Any) -> None:
        self._device = active.get_current_device()
        self._target = active.get_current_target()

    def get_current_device(self) -> Any:
        return self._device

    def get_current_target(self) -> Any:
        return self._target

    def get_current_stream(self, device: Any = None) -> int:
        return 0


def make_pool(
    compile_one: Callable[[Candidate], Any], workers: int, timeout_s: float, how: str, patient: bool = True
) -> CompilePool:
    """`how` is `fork`, `threads`, or `auto`: children where they can hand their binaries over."""
    from triton import knobs
    from triton.runtime.driver import driver

    if how == "auto":
        shared = not knobs.compilation.always_compile
        how = "fork" if sys.platform == "linux" and shared else "threads"
    if how == "threads":
        return ThreadPool(compile_one, workers, timeout_s, _device_selector())
    stand_in = _Target(driver.active)

    def in_child(candidate: Candidate) -> Any:
        active = driver.active
        driver.set_active(stand_in)
        try:
            return compile_one(candidate)
        finally:
            driver.set_active(active)

    return ForkPool(in_child, workers, timeout_s, patient)


def _device_selector() -> Callable[[], None]:
    """A function for compile threads: a new thread starts on device 0, whatever its parent uses."""
    import torch

    if not torch.cuda.is_available():
        return lambda: None
    index = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(index)
