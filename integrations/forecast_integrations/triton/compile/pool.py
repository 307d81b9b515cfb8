"""Compile candidates in parallel, without launching them: in forked children, or on threads.

Children are the default where the platform has `fork`: they do not share the interpreter lock, so the parent times
kernels undisturbed while they compile (with threads in one process, medians came out up to thirty times too long), a
compiler that aborts or hangs takes only its child along, and a child is killed when nobody wants its result any more.
The binary travels through Triton's own disk cache. A child never touches the device: the driver it sees is a stand-in
that only knows the target.
"""

from __future__ import annotations

import contextvars
import math
import os
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from forecast_autotune.languages import CompilingThreads
from forecast_autotune.records import Candidate, Outcome
from forecast_autotune.telemetry.spans import record
from forecast_integrations.triton.compile.children import (
    DispatchedTask,
    Dispatcher,
    ForkedChild,
    ForkedChildren,
)
from forecast_integrations.triton.compile.first_launch import FirstLaunch
from forecast_integrations.triton.problem.call import KernelCall, is_of_compiler, outcome_of

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget


@dataclass
class CompileResult:
    """One finished compilation: a binary (in memory or in Triton's cache), or an outcome."""

    candidate: Candidate
    seconds: float = 0.0
    outcome: Outcome | None = None
    """None when it compiled, or is `doubtful`."""
    message: str = ""
    doubtful: bool = False
    """Whether the failure may be due to the child or thread: the process and thread of the call try again."""
    began_s: float | None = None
    """Begin of the compilation, by `time.perf_counter`; None where it was not compiled now."""
    raised: bool = False
    """Whether the compiler raised an exception, which another compilation would raise again; else it hung or died."""

    def fail(self, outcome: Outcome | None, message: str, of_compiler: bool) -> None:
        """Note an exception, and whether it counts as the candidate's failure.

        The compiler's own does. Any other may be due to its place, a fork without a device or another thread, and
        makes the result doubtful. A lack of memory is not tried again.
        """
        self.message, self.raised = message, True
        self.doubtful = not of_compiler and outcome is not Outcome.INFRASTRUCTURE
        if not self.doubtful:
            self.outcome = Outcome.COMPILE_ERROR if outcome is Outcome.RUNTIME_ERROR else outcome


def _exception(error: BaseException) -> tuple[Outcome | None, str, bool]:
    """Return an exception as `CompileResult.fail` takes it."""
    outcome = Outcome.INFRASTRUCTURE if isinstance(error, MemoryError) else outcome_of(error)
    return outcome, f"{type(error).__name__}: {error}"[:2000], outcome is not None and is_of_compiler(error)


_MAX_THREAD_TRIES = 4


class ThreadPool:
    """Compile on daemon threads, where there is no `fork`."""

    quiet = False
    """Timing has to wait until compilations are done."""

    def __init__(
        self,
        compile_one: Callable[[Candidate], object],
        workers: int,
        timeout_s: float,
        prepare: Callable[[], None],
    ) -> None:
        self._compile, self._prepare, self._timeout_s = compile_one, prepare, timeout_s
        context = contextvars.copy_context()  # of the call: a thread begins with an empty one
        self._threads = CompilingThreads(lambda c: context.copy().run(self._attempt, c), workers)
        self._collected: set[Candidate] = set()
        self.compile_s = 0.0
        self.finished = 0
        self.while_waiting: Callable[[], object] = lambda: None

    def schedule(self, candidates: Sequence[Candidate]) -> None:
        """Queue candidates in place of those that wait; a thread ends its current one."""
        self._threads.schedule(candidates)

    def compiling(self) -> Mapping[Candidate, float]:
        """Return the candidates that compile now, with their seconds."""
        return self._threads.running()

    def next(self, within_s: float | None = None) -> CompileResult | None:
        """Wait for a thread; one that exceeds the timeout is left behind and replaced."""
        until = math.inf if within_s is None else time.perf_counter() + within_s
        while True:
            self._threads.wait(
                lambda _: bool(self._threads.done.keys() - self._collected),
                max(0.0, min(0.25, until - time.perf_counter())),
            )
            if results := self._take(1):
                return results[0]
            if time.perf_counter() >= until:
                return None
            late = TimeoutError(f"not compiled after {self._timeout_s:g} s")
            for candidate, seconds in self._threads.running().items():
                if seconds > self._timeout_s:
                    self._threads.leave_behind(candidate, late)

    def done(self) -> list[CompileResult]:
        """Collect what the threads have finished by now."""
        return self._take(None)

    def close(self) -> None:
        """Drop the queue, and wait for running compilations: a compiler cannot be interrupted."""
        self._threads.close(self._timeout_s)

    def _take(self, most: int | None) -> list[CompileResult]:
        results = []
        for candidate in [c for c in list(self._threads.done) if c not in self._collected][:most]:
            self._collected.add(candidate)
            attempt = self._threads.done[candidate]
            result = attempt.result or CompileResult(candidate, outcome=Outcome.TIMEOUT)
            result.seconds, self.finished = attempt.seconds, self.finished + (attempt.error is None)
            self.compile_s += attempt.seconds if attempt.error is None else 0.0
            if attempt.error is not None:
                result.message = f"TimeoutError: {attempt.error}"
            results.append(result)
        return results

    def _attempt(self, candidate: Candidate) -> CompileResult:
        result = CompileResult(candidate, began_s=time.perf_counter())
        try:
            self._prepare()
        except Exception as error:
            result.outcome = Outcome.INFRASTRUCTURE
            result.message = f"a compile thread could not select the device: {error}"
            return result
        for tries_left in reversed(range(_MAX_THREAD_TRIES)):
            try:
                self._compile(candidate)
            except BaseException as error:
                # CPython 3.11's ast.parse counts its depth for all threads together and trips over it now and then
                # ("AST constructor recursion depth mismatch"): that is not the kernel's fault.
                if tries_left and isinstance(error, SystemError):
                    continue
                result.fail(*_exception(error))
            return result
        return result


class ForkPool:
    """One forked child per compilation, at most `workers` at a time."""

    quiet = True

    def __init__(
        self,
        compile_one: Callable[[Candidate], object],
        workers: int,
        timeout_s: float,
        call: KernelCall | None = None,
    ) -> None:
        """`timeout_s` is the most a compilation may take.

        With a `call`, a `Dispatcher` forks the children, and the call's first launch is prepared before the first
        result. Without, `compile_one` may depend on state that this process changes later.
        """
        self.compile_s = 0.0
        self.finished = 0
        self._delays: list[float] = []
        """Seconds until each child began to compile, which grow with the number of children forked at once."""
        self._compile, self._workers, self._timeout_s = compile_one, workers, timeout_s
        self._waiting: deque[Candidate] = deque()
        self._started: set[Candidate] = set()
        """Candidates that compile or have compiled."""
        self._children = ForkedChildren()
        self._ended: deque[CompileResult] = deque()
        self._candidates: Collection[Candidate] = () if call is None else frozenset(call.configs)
        """Candidates that the dispatcher knows; later ones are forked here."""
        self._dispatcher: Dispatcher | None = None
        self._first_launch: FirstLaunch | None = None
        self.while_waiting: Callable[[], object] = lambda: None
        """Called in `next` about four times a second."""
        if call is not None:
            # Last: children see this pool as it is when the dispatcher is forked.
            self._dispatcher = Dispatcher({"compile": self._attempt}, workers)
            self._first_launch = FirstLaunch(call, timeout_s)
            self._first_launch.begin()

    def schedule(self, candidates: Sequence[Candidate]) -> None:
        """Compile these next, in this order, unless they were started; they replace the queue.

        A running compilation of another candidate is killed where one of them needs its worker.
        """
        while self._listen(0.0):  # collect ended children before any is killed
            pass
        order = dict.fromkeys(candidates)
        fresh = [c for c in order if c not in self._started]
        if self._first_launch is not None:
            self._first_launch.start(fresh)
        lacking = len(fresh) + len(self._children) - self._workers
        stale = [child for child in self._children.running() if child.tag not in order]
        # The youngest have done the least work.
        for child in sorted(stale, key=lambda child: -child.began)[: max(0, lacking)]:
            self._children.kill(child)
            _record_given_up(child)
            self._started.discard(child.tag)
        self._waiting = deque(fresh)
        self._fill()

    def compiling(self) -> Mapping[Candidate, float]:
        """Return the candidates that compile now, with seconds counted as those of finished compilations are."""
        begin = time.perf_counter() - (statistics.median(self._delays) if self._delays else 0.0)
        return {child.tag: max(0.0, begin - child.began) for child in self._children.running()}

    def next(self, within_s: float | None = None) -> CompileResult | None:
        """Wait for a child; one that exceeds the timeout is killed and counts as hung."""
        limit = math.inf if within_s is None else time.perf_counter() + within_s
        while True:
            self._fill()
            if self._ended:
                if self._first_launch is not None and self._ended[0].outcome is None:
                    self._first_launch.wait()
                return self._ended.popleft()
            if self._first_launch is not None:
                self._first_launch.use_idle_time()
            self.while_waiting()
            if time.perf_counter() >= limit:
                return None
            if self._listen(max(0.0, min(0.25, limit - time.perf_counter()))):
                # Only a silent child can hang: messages may have waited long for this process.
                continue
            for child in self._children.overdue(self._timeout_s):
                self._children.kill(child)
                late = f"TimeoutError: not compiled after {self._timeout_s:.3g} s"
                self._ended.append(
                    CompileResult(child.tag, self._timeout_s, Outcome.TIMEOUT, late, began_s=child.began)
                )

    def done(self) -> list[CompileResult]:
        """Collect the children that have finished by now."""
        while self._listen(0.0):
            pass
        self._fill()
        results = list(self._ended)
        self._ended.clear()
        if self._first_launch is not None and any(result.outcome is None for result in results):
            self._first_launch.wait()
        return results

    def close(self) -> None:
        """Kill the children, whose results are not needed any more."""
        self._waiting.clear()
        for child in self._children.running():
            _record_given_up(child)
        self._children.close()
        if self._first_launch is not None:
            self._first_launch.close()
        if self._dispatcher is not None:
            self._dispatcher.close()

    def _listen(self, timeout_s: float) -> bool:
        results, has_news = self._children.finished(timeout_s)
        for child, status in results:
            if child.hung:
                # A fork can hang by itself: another child compiles the candidate.
                self._start(child.tag, None)
            else:
                self._ended.append(self._result(child, status))
        return has_news

    def _fill(self) -> None:
        while self._waiting and len(self._children) < self._workers:
            candidate = self._waiting.popleft()
            self._started.add(candidate)
            self._start(candidate, self._dispatcher_task(candidate))

    def _start(self, candidate: Candidate, dispatcher_task: DispatchedTask | None) -> None:
        try:
            self._children.start(candidate, partial(self._attempt, candidate), dispatcher_task)
        except OSError as error:
            self._ended.append(_start_failure(candidate, str(error)))

    def _dispatcher_task(self, candidate: Candidate) -> DispatchedTask | None:
        if self._dispatcher is None or candidate not in self._candidates:
            return None
        return DispatchedTask(self._dispatcher, "compile", candidate)

    def _attempt(self, candidate: Candidate) -> dict[str, Any]:
        """Compile in a child, and return its answer."""
        begin = time.perf_counter()
        answer: dict[str, Any] = {}
        try:
            self._compile(candidate)
        except BaseException as error:
            answer = {"exception": _exception(error)}
        return {**answer, "began": begin, "seconds": time.perf_counter() - begin}

    def _result(self, child: ForkedChild, status: int) -> CompileResult:
        if child.refusal:
            return _start_failure(child.tag, child.refusal)
        result = CompileResult(child.tag, time.perf_counter() - child.began, began_s=child.began)
        try:
            answer = child.answer()
        except ValueError:
            # The child died without an answer: an abort inside the compiler, unless another process (the
            # operating system for want of memory, say) killed it.
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {status >> 8}"
            is_abort = os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL
            result.outcome = Outcome.COMPILE_ERROR if is_abort else Outcome.INFRASTRUCTURE
            result.message = f"the compiler died ({how})"
            return result
        result.seconds, result.began_s = float(answer["seconds"]), float(answer["began"])
        self._delays.append(max(0.0, result.began_s - child.began))
        self.compile_s += result.seconds
        self.finished += 1
        if "exception" in answer:
            outcome, message, of_compiler = answer["exception"]
            result.fail(outcome and Outcome(outcome), message, of_compiler)
        return result


def _record_given_up(child: ForkedChild) -> None:
    record("compile", "compile", child.began, time.perf_counter(), candidate=child.tag, outcome="given up")


def _start_failure(candidate: Candidate, reason: str) -> CompileResult:
    """Return the result for a lack of processes, memory or descriptors, which is not the candidate's fault."""
    return CompileResult(candidate, 0.0, Outcome.INFRASTRUCTURE, f"no child could be started: {reason}")


CompilePool: TypeAlias = ThreadPool | ForkPool
_FORK_BELOW = 16 * 2**30
"""Forking copies about 2 MB of page tables per GB in use: beyond this, threads are quicker."""


def can_fork() -> bool:
    """Whether this process can fork children quickly."""
    return sys.platform == "linux" and _resident_bytes() < _FORK_BELOW


def _resident_bytes() -> int:
    """Return the bytes of memory that this process uses; 0 where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class _TargetOnlyDriver:
    """The driver in a forked child: it knows the target, and nothing else."""

    def __init__(self, active: Any) -> None:
        self._device = active.get_current_device()
        self._target = active.get_current_target()

    def get_current_device(self) -> int:
        return self._device

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def make_pool(
    compile_one: Callable[[Candidate], object],
    workers: int,
    timeout_s: float,
    how: str,
    call: KernelCall | None = None,
) -> CompilePool | None:
    """Return a pool; `how` is `fork`, `threads`, or `auto`: children where Triton's cache can carry their binaries.

    With a `call`, its first launch is prepared, too. None where threads would run code of others, which may wait for
    a lock that the caller's thread holds: launches compile then.
    """
    from triton import knobs
    from triton.runtime.jit import JITFunction

    from forecast_integrations.triton.upstream import is_of_triton

    if call is not None:
        _ = call.computed  # here, before any fork and any other thread
    if how == "auto":
        # A child's binary reaches this process through Triton's cache.
        how = "fork" if can_fork() and not knobs.compilation.always_compile else "threads"
    if how == "threads":
        own = call is None or all(map(call.compiles_alone, call.configs))
        if not own or not is_of_triton(JITFunction.run):
            return None
        return ThreadPool(compile_one, workers, timeout_s, _device_selector())
    return ForkPool(without_device(compile_one), workers, timeout_s, call)


def without_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function for a child: under a driver that knows the target alone.

    Raises `RuntimeError` when there is no driver to ask for its target.
    """
    from triton.runtime.driver import driver

    stand_in = _TargetOnlyDriver(driver.active)

    def call(*args: object) -> Any:
        active = driver.active
        driver.set_active(stand_in)
        try:
            return function(*args)
        finally:
            driver.set_active(active)

    return call


def _device_selector() -> Callable[[], None]:
    """Return a function that selects the parent's device in a compile thread, which starts on device 0."""
    import torch

    if not torch.cuda.is_available():
        return lambda: None
    index = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(index)
