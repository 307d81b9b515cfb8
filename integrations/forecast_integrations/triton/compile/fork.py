"""Compile in forked children, one per candidate: see `children`."""

from __future__ import annotations

import math
import os
import resource
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from forecast_autotune.records import Candidate, Outcome
from forecast_autotune.telemetry.spans import record
from forecast_integrations.triton.compile.dispatcher import Dispatcher
from forecast_integrations.triton.compile.first_launch import CHILD_TASKS, FirstLaunch
from forecast_integrations.triton.compile.forked_children import (
    DispatchedTask,
    ForkedChild,
    ForkedChildren,
)
from forecast_integrations.triton.compile.protocol import CompileResult
from forecast_integrations.triton.problem.call import KernelCall, outcome_of

_STRAGGLER_FACTOR = 5.0
"""A compilation that takes this many times the median has usually unrolled or spilled without bounds,
and makes a slow kernel: an impatient pool does not wait for it. A plan by wall time drops it sooner, by
`tuning.preparation.compile_times`; this bounds what policies cost that do not look at the clock."""
_STRAGGLER_S = 6.0
"""Seconds that a compilation is always granted, however quick the others are."""


class ForkPool:
    """One forked child per compilation, at most `workers` at a time."""

    quiet = True

    def __init__(
        self,
        compile_one: Callable[[Candidate], object],
        workers: int,
        timeout_s: float,
        patient: bool = True,
        call: KernelCall | None = None,
    ) -> None:
        """`timeout_s` is the most a compilation may take; an impatient pool gives up earlier.

        With a `call`, children are forked by a `Dispatcher`, and what its first launch needs is prepared besides,
        before the first binary is handed out. Without, `compile_one` may depend on what this process does later.
        """
        self.compile_s = 0.0
        self.finished = 0
        self._patient = patient
        self._seconds: list[float] = []
        self._delays: list[float] = []
        """Seconds until each child began to compile: it is forked, and others of the first wave with it."""
        self._compile, self._workers, self._timeout_s = compile_one, workers, timeout_s
        self._waiting: deque[Candidate] = deque()
        self._started: set[Candidate] = set()
        """What compiles or has compiled."""
        self._children = ForkedChildren()
        self._ended: deque[CompileResult] = deque()
        self._known: Collection[Candidate] = () if call is None else frozenset(call.configs)
        """What the dispatcher can compile; others may have come after it."""
        self._dispatcher: Dispatcher | None = None
        self._first_launch: FirstLaunch | None = None
        self.while_waiting: Callable[[], object] = lambda: None
        if call is not None:
            # Last: children see this pool as it is when the dispatcher is forked.
            self._dispatcher = Dispatcher({**CHILD_TASKS, "compile": self._attempt}, workers)
            self._first_launch = FirstLaunch(call, timeout_s, self._dispatcher)
            self._first_launch.begin()

    def schedule(self, candidates: Sequence[Candidate]) -> None:
        """Queue candidates that were not started; see `CompilePool`. Starts as many as there are free workers."""
        while self._listen(0.0):  # what has ended is not to be killed
            pass
        listed = dict.fromkeys(candidates)
        fresh = [c for c in listed if c not in self._started]
        if self._first_launch is not None:
            self._first_launch.start(fresh)
        lacking = len(fresh) + len(self._children) - self._workers
        unwanted = [child for child in self._children.running() if child.tag not in listed]
        # The youngest have the least to lose.
        for child in sorted(unwanted, key=lambda one: -one.began)[: max(0, lacking)]:
            self._children.kill(child)
            _record_given_up(child)
            self._started.discard(child.tag)
        self._waiting = deque(fresh)
        self._fill()

    def compiling(self) -> Mapping[Candidate, float]:
        """What compiles now, with its seconds, counted as those of what has compiled are."""
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
                # Only a silent child can hang: others may have waited long for us to listen.
                continue
            most = self._most()
            for child in self._children.overdue(most):
                self._children.kill(child)
                message = f"TimeoutError: not compiled after {most:.3g} s"
                self._ended.append(
                    CompileResult(child.tag, most, Outcome.TIMEOUT, message, began_s=child.began)
                )

    def _most(self) -> float:
        """Seconds that a compilation may take by now."""
        if self._patient or len(self._seconds) < 3:
            return self._timeout_s
        return min(self._timeout_s, max(_STRAGGLER_S, _STRAGGLER_FACTOR * statistics.median(self._seconds)))

    def done(self) -> list[CompileResult]:
        """Collect the children that have finished by now."""
        while self._listen(0.0):
            pass
        self._fill()
        found = list(self._ended)
        self._ended.clear()
        if self._first_launch is not None and any(result.outcome is None for result in found):
            self._first_launch.wait()
        return found

    def close(self) -> None:
        """Kill the children: what they were compiling is not wanted any more."""
        self._waiting.clear()
        for child in self._children.running():
            _record_given_up(child)
        self._children.close()
        if self._first_launch is not None:
            self._first_launch.close()
        if self._dispatcher is not None:
            self._dispatcher.close()

    def _listen(self, timeout_s: float) -> bool:
        ended, answered = self._children.finished(timeout_s)
        for child, status in ended:
            if child.hung:
                # Forked anew, it need not: that is nothing that the candidate has done.
                self._start(child.tag, None)
            else:
                self._ended.append(self._result(child, status))
        return answered

    def _fill(self) -> None:
        while self._waiting and len(self._children) < self._workers:
            candidate = self._waiting.popleft()
            self._started.add(candidate)
            self._start(candidate, self._dispatched(candidate))

    def _start(self, candidate: Candidate, dispatched: DispatchedTask | None) -> None:
        try:
            self._children.start(candidate, partial(self._attempt, candidate), dispatched)
        except OSError as error:
            self._ended.append(_not_started(candidate, str(error)))

    def _dispatched(self, candidate: Candidate) -> DispatchedTask | None:
        if self._dispatcher is None or candidate not in self._known:
            return None
        return DispatchedTask(self._dispatcher, "compile", candidate)

    def _attempt(self, candidate: Candidate) -> dict[str, Any]:
        """What a child does."""
        if self._first_launch is not None:
            self._first_launch.enter_child()
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
        # What compiles alone takes as long as it computes; here it may have waited for a core.
        cpu = sum(
            sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        return {**answer, "began": begin, "seconds": time.perf_counter() - begin, "cpu_seconds": cpu}

    def _result(self, child: ForkedChild, status: int) -> CompileResult:
        if child.refusal:
            return _not_started(child.tag, child.refusal)
        result = CompileResult(child.tag, time.perf_counter() - child.began, began_s=child.began)
        try:
            answer = child.answer()
        except ValueError:
            # It died without a word: an abort inside the compiler, unless somebody else (the kernel
            # when memory is short, say) killed it.
            how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {status >> 8}"
            aborted = os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL
            result.outcome = Outcome.COMPILE_ERROR if aborted else Outcome.INFRASTRUCTURE
            result.message = f"the compiler died ({how})"
            return result
        result.seconds, result.cpu_seconds = float(answer["seconds"]), float(answer["cpu_seconds"])
        result.began_s = float(answer["began"])
        self._delays.append(max(0.0, result.began_s - child.began))
        self._seconds.append(result.seconds)
        self.compile_s += result.seconds
        self.finished += 1
        if "outcome" not in answer:
            return result
        result.message = answer["message"]
        if answer["outcome"] is None:
            # The caller's mistake: repeat it here, where the user sees it with its own traceback.
            try:
                self._compile(result.candidate)
            except BaseException as error:
                result.error = error
            return result
        result.raised = True
        outcome = Outcome(answer["outcome"])
        result.outcome = Outcome.COMPILE_ERROR if outcome is Outcome.RUNTIME_ERROR else outcome
        return result


def _record_given_up(child: ForkedChild) -> None:
    record("compile", "compile", child.began, time.perf_counter(), candidate=child.tag, outcome="given up")


def _not_started(candidate: Candidate, reason: str) -> CompileResult:
    """No more processes, memory or descriptors: not the candidate's fault."""
    return CompileResult(candidate, 0.0, Outcome.INFRASTRUCTURE, f"no child could be started: {reason}")
