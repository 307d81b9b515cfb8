"""Judges at work on this machine: one supervised lane each, jobs by id, failing lanes kept out."""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from forecast_autotune.records import codec, digest
from forecast_harness.records import ConfirmationJob, FullVerification, NodeJob, NodeResult, VerificationJob
from forecast_harness.trials.protocol import LaneFailure, NodeJudge

MAX_OPEN_FAILURES = 3
"""Failures to open in a row after which a lane is in quarantine."""
RETRY_S = 20.0
"""Seconds that a lane in quarantine waits before it tries again."""
_CLOSE_TIMEOUT_S = 20.0
"""Seconds for all lanes together to close."""


@dataclass
class _LaneTask:
    """One operation, and the future that its caller waits for."""

    key: str
    operation: Callable[[NodeJudge], Any]
    future: Future[Any]
    judge: NodeJudge | None = None
    """The judge that works on it."""
    given_up: bool = False
    """Whether nobody waits for it any more: that it fails is no fault of its lane."""


@dataclass
class LaneWorker:
    """The state of a supervisor's thread."""

    number: int
    state: str = "opening"
    """`opening`, `ready`, `busy`, `quarantined` or `left`."""
    strikes: int = 0
    restarts: int = 0
    problem: str = ""
    """Why it last failed."""
    thread: threading.Thread | None = field(default=None, repr=False)

    @property
    def is_available(self) -> bool:
        """Whether it takes jobs, or is about to."""
        return self.state not in ("quarantined", "left")


class LocalJudgePool:
    """`n` lanes, each a thread with a judge of its own, made by `make_judge(number)` in that thread.

    A judge that opens is healthy, see `open_judge`. After any `LaneFailure`, and any error of the judge itself,
    a lane is closed and opened again before it gets another job; one that fails `MAX_OPEN_FAILURES` times in a row to
    open is in quarantine and tries again every `RETRY_S` seconds. While all are, waiting jobs are lost.
    """

    def __init__(self, make_judge: Callable[[int], NodeJudge], n: int) -> None:
        if n < 1:
            raise ValueError(f"there must be at least one lane, not {n}")
        self._make_judge = make_judge
        self._condition = threading.Condition()
        self._waiting: deque[_LaneTask] = deque()
        self._tasks: dict[str, _LaneTask] = {}
        """Waiting, running and done, by key; lost ones are forgotten, so that they can be tried again."""
        self._closing = False
        self.lanes: list[LaneWorker] = []
        for _ in range(n):
            self._join()

    def submit(self, job: NodeJob) -> Future[NodeResult]:
        """Judge it on the next free lane. A job whose id is known and not lost is not run again."""
        return self._add(job.id, lambda judge: judge.judge(job))

    def verify(self, job: VerificationJob) -> Future[FullVerification]:
        """Verify it in full on the next free lane, before all jobs that wait."""
        return self._add(job.id, lambda judge: judge.verify(job), first=True)

    def confirm(self, confirm: ConfirmationJob) -> Future[Mapping[str, NodeResult]]:
        """Time the finalists on the next free lane; at most once for the same finalists and configs."""
        parts = [[n.id for n in confirm.nodes], codec.to_json(confirm.configs), confirm.seed_node.id]
        return self._add(f"confirm-{digest(confirm.target.id, parts)}", lambda judge: judge.confirm(confirm))

    @property
    def capacity(self) -> int:
        """Lanes that work or are about to."""
        with self._condition:
            return sum(lane.is_available for lane in self.lanes)

    @property
    def problem(self) -> str:
        """Why nothing that is found can be confirmed, as far as that is known before anything is."""
        return ""

    def _join(self) -> None:
        """Add a lane."""
        with self._condition:
            lane = LaneWorker(len(self.lanes))
            self.lanes.append(lane)
        name = f"search-lane-{lane.number}"
        lane.thread = threading.Thread(target=self._supervise, args=(lane,), name=name, daemon=True)
        lane.thread.start()

    def give_up(self) -> None:
        """Cancel what waits, and have judges end what they are at; their lanes stay open."""
        with self._condition:
            waiting, judges = self._take_waiting(), dict[int, NodeJudge]()
            for task in self._tasks.values():
                if task.judge is not None:
                    task.given_up = True
                    judges[id(task.judge)] = task.judge
        self._fail_tasks(waiting, LaneFailure("given up"))
        for judge in judges.values():
            judge.give_up()

    def close(self) -> None:
        """End all lanes. Waiting jobs are cancelled; running ones may end, for some seconds."""
        with self._condition:
            self._closing = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._condition.notify_all()
        for task in waiting:
            task.future.cancel()
        until = time.monotonic() + _CLOSE_TIMEOUT_S
        for lane in self.lanes:
            if lane.thread is not None:
                lane.thread.join(max(0.0, until - time.monotonic()))

    def _add(self, key: str, do: Callable[[NodeJudge], Any], *, first: bool = False) -> Future[Any]:
        with self._condition:
            if self._closing:
                late: Future[Any] = Future()
                late.set_exception(LaneFailure("the lanes are closed"))
                return late
            if key not in self._tasks:
                task = self._tasks[key] = _LaneTask(key, do, Future())
                (self._waiting.appendleft if first else self._waiting.append)(task)
                self._condition.notify_all()  # one alone might be a lane in quarantine
            return self._tasks[key].future

    # --- a supervisor's thread ---

    def _supervise(self, lane: LaneWorker) -> None:
        judge: NodeJudge | None = None
        try:
            while not self._closing:
                if judge is None:
                    judge = self._open_judge(lane)
                elif (task := self._next_task(lane, judge)) is not None and not self._run_task(
                    lane, judge, task
                ):
                    self._close_judge(judge)
                    judge = None
        finally:
            if judge is not None:
                self._close_judge(judge)
            with self._condition:
                lane.state = "left"
                tasks = [] if self._any_available() else self._take_waiting()
            self._fail_tasks(tasks, LaneFailure("no lane is left", f"lane {lane.number}"))

    def _open_judge(self, lane: LaneWorker) -> NodeJudge | None:
        try:
            judge = self._make_judge(lane.number)
        except Exception as error:  # after any error this lane does not work
            with self._condition:
                lane.strikes += 1
                lane.problem = f"{type(error).__name__}: {error}"
                if lane.strikes < MAX_OPEN_FAILURES:
                    return None
                lane.state = "quarantined"
                tasks = [] if self._any_available() else self._take_waiting()
            self._fail_tasks(
                tasks, LaneFailure(f"no lane works; the last: {lane.problem}", f"lane {lane.number}")
            )
            with self._condition:
                self._condition.wait_for(lambda: self._closing, RETRY_S)
            return None
        with self._condition:
            lane.strikes, lane.state = 0, "ready"
        return judge

    def _next_task(self, lane: LaneWorker, judge: NodeJudge) -> _LaneTask | None:
        with self._condition:
            self._condition.wait_for(lambda: self._waiting or self._closing)
            if self._closing:
                return None
            task = self._waiting.popleft()
            if not task.future.running() and not task.future.set_running_or_notify_cancel():
                del self._tasks[task.key]
                return None
            lane.state, task.judge = "busy", judge
            return task

    def _run_task(self, lane: LaneWorker, judge: NodeJudge, task: _LaneTask) -> bool:
        """Do it; whether the lane is still good."""
        try:
            if task.given_up:
                raise LaneFailure("given up")
            result = task.operation(judge)
        except Exception as error:
            failure = (
                error if isinstance(error, LaneFailure) else LaneFailure(f"{type(error).__name__}: {error}")
            )
            failure.lane = failure.lane or f"lane {lane.number}"
            with self._condition:
                task.judge = None
                if task.given_up:
                    lane.state = "ready"
                else:
                    lane.restarts, lane.problem, lane.state = lane.restarts + 1, str(failure), "opening"
            self._fail_tasks([task], failure)
            return task.given_up
        with self._condition:
            task.judge, lane.state = None, "ready"
        task.future.set_result(result)
        return True

    def _any_available(self) -> bool:
        return any(lane.is_available for lane in self.lanes)

    def _take_waiting(self) -> list[_LaneTask]:
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    def _fail_tasks(self, tasks: list[_LaneTask], error: LaneFailure) -> None:
        for task in tasks:
            with self._condition:
                self._tasks.pop(task.key, None)  # first: the waiting caller may submit it again at once
            if task.future.running() or task.future.set_running_or_notify_cancel():
                task.future.set_exception(error)

    def _close_judge(self, judge: NodeJudge) -> None:
        try:
            judge.close()
        except Exception as error:  # a new judge must not have to wait for the end of a broken one
            warnings.warn(f"a lane's judge did not close: {error!r}", RuntimeWarning, stacklevel=2)
