"""Judges at work on this machine: one supervised lane each, jobs by id, failing lanes kept out."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from forecast_autotune.records import digest
from forecast_harness.search import codec
from forecast_harness.search.events import Confirm, Job
from forecast_harness.search.interfaces import Judge, LaneLost
from forecast_harness.search.records import Judged

STRIKES = 3
"""Failures to open in a row after which a lane is in quarantine."""
RETRY_S = 20.0
"""How long a lane in quarantine waits before it tries again."""
REQUEUES = 2
"""How often a job whose lane went away, and the machine with it, is given to another one."""
_CLOSE_S = 20.0


class LaneGone(LaneLost):
    """The lane ended with its process or machine while it held a job: nobody is to blame."""


@dataclass
class _Task:
    """One thing to do and who waits for it."""

    key: str
    do: Callable[[Judge], Any]
    future: Future[Any]
    requeues: int = 0


@dataclass
class Lane:
    """What a supervisor's thread is up to."""

    number: int
    state: str = "opening"
    """`opening`, `ready`, `busy`, `quarantined` or `left`."""
    strikes: int = 0
    restarts: int = 0
    problem: str = ""
    """Why it last failed."""
    retire: bool = False
    """Whether it is to leave once it is idle."""
    thread: threading.Thread | None = field(default=None, repr=False)

    @property
    def works(self) -> bool:
        """Whether it takes jobs, or is about to."""
        return not self.retire and self.state not in ("quarantined", "left")


class LocalLanes:
    """`n` lanes, each a thread with a judge of its own, made by `make_judge(number)` in that thread.

    A judge that opens is healthy, see `open_judge`. After any `LaneLost`, and any error of the judge itself,
    a lane is closed and opened again before it gets another job; one that fails `STRIKES` times in a row to
    open is in quarantine and tries again every `retry_s` seconds. While all are, waiting jobs are lost.
    """

    def __init__(
        self,
        make_judge: Callable[[int], Judge],
        n: int,
        *,
        strikes: int = STRIKES,
        retry_s: float = RETRY_S,
        requeues: int = REQUEUES,
    ) -> None:
        if n < 1:
            raise ValueError(f"there must be at least one lane, not {n}")
        self._make, self._strikes, self._retry_s, self._requeues = make_judge, strikes, retry_s, requeues
        self._changed = threading.Condition()
        self._waiting: deque[_Task] = deque()
        self._tasks: dict[str, _Task] = {}
        """Waiting, running and done, by key; lost ones are forgotten, so that they can be tried again."""
        self._closing = False
        self.lanes: list[Lane] = []
        for _ in range(n):
            self.join()

    def submit(self, job: Job) -> Future[Judged]:
        """Judge it on the next free lane. A job whose id is known and not lost is not run again."""
        return self._add(job.id, lambda judge: judge.judge(job))

    def confirm(self, confirm: Confirm) -> Future[Mapping[str, Judged]]:
        """Time the finalists on the next free lane; at most once for the same finalists and configs."""
        known = [[n.id for n in confirm.nodes], codec.to_json(confirm.configs), confirm.seed_node.id]
        return self._add(f"confirm-{digest(confirm.target.id, known)}", lambda judge: judge.confirm(confirm))

    @property
    def width(self) -> int:
        """Lanes that work or are about to."""
        with self._changed:
            return sum(lane.works for lane in self.lanes)

    def join(self) -> Lane:
        """Add a lane."""
        with self._changed:
            lane = Lane(len(self.lanes))
            self.lanes.append(lane)
        name = f"search-lane-{lane.number}"
        lane.thread = threading.Thread(target=self._supervise, args=(lane,), name=name, daemon=True)
        lane.thread.start()
        return lane

    def leave(self, lane: Lane) -> None:
        """Take a lane out, once it is idle."""
        with self._changed:
            lane.retire = True
            self._changed.notify_all()

    def close(self) -> None:
        """End all lanes. What waits is cancelled; what runs may end, for some seconds."""
        with self._changed:
            self._closing = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for task in waiting:
            task.future.cancel()
        for lane in self.lanes:
            if lane.thread is not None:
                lane.thread.join(_CLOSE_S)

    def _add(self, key: str, do: Callable[[Judge], Any]) -> Future[Any]:
        with self._changed:
            if self._closing:
                late: Future[Any] = Future()
                late.set_exception(LaneLost("the lanes are closed"))
                return late
            if key not in self._tasks:
                task = self._tasks[key] = _Task(key, do, Future())
                self._waiting.append(task)
                self._changed.notify_all()  # one alone might be a lane in quarantine
            return self._tasks[key].future

    # --- a supervisor's thread ---

    def _supervise(self, lane: Lane) -> None:
        judge: Judge | None = None
        try:
            while not self._over(lane):
                if judge is None:
                    judge = self._opened(lane)
                elif (task := self._next(lane)) is not None and not self._did(lane, judge, task):
                    self._closed(judge)
                    judge = None
        finally:
            if judge is not None:
                self._closed(judge)
            with self._changed:
                lane.state = "left"
                abandoned = [] if self._any_left() else self._taken()
            self._lose(abandoned, LaneLost("no lane is left", f"lane {lane.number}"))

    def _over(self, lane: Lane) -> bool:
        with self._changed:
            return self._closing or lane.retire

    def _opened(self, lane: Lane) -> Judge | None:
        try:
            judge = self._make(lane.number)
        except Exception as error:  # whatever it is, this lane does not work
            with self._changed:
                lane.strikes += 1
                lane.problem = f"{type(error).__name__}: {error}"
                if lane.strikes < self._strikes:
                    return None
                lane.state = "quarantined"
                abandoned = [] if self._any_left() else self._taken()
            self._lose(abandoned, LaneLost(f"no lane works; the last: {lane.problem}", f"lane {lane.number}"))
            with self._changed:
                self._changed.wait_for(lambda: self._closing or lane.retire, self._retry_s)
            return None
        with self._changed:
            lane.strikes, lane.state = 0, "ready"
        return judge

    def _next(self, lane: Lane) -> _Task | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing or lane.retire)
            if self._closing or lane.retire:
                return None
            task = self._waiting.popleft()
            if not task.future.running() and not task.future.set_running_or_notify_cancel():
                del self._tasks[task.key]
                return None
            lane.state = "busy"
            return task

    def _did(self, lane: Lane, judge: Judge, task: _Task) -> bool:
        """Do it; whether the lane is still good."""
        try:
            result = task.do(judge)
        except Exception as error:
            lost = error if isinstance(error, LaneLost) else LaneLost(f"{type(error).__name__}: {error}")
            lost.lane = lost.lane or f"lane {lane.number}"
            with self._changed:
                lane.restarts, lane.problem, lane.state = lane.restarts + 1, str(lost), "opening"
                again = isinstance(lost, LaneGone) and task.requeues < self._requeues and not self._closing
                if again:
                    task.requeues += 1
                    self._waiting.appendleft(task)
                    self._changed.notify_all()
            if not again:
                self._lose([task], lost)
            return False
        with self._changed:
            lane.state = "ready"
        task.future.set_result(result)
        return True

    def _any_left(self) -> bool:
        return any(lane.works for lane in self.lanes)

    def _taken(self) -> list[_Task]:
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    def _lose(self, tasks: list[_Task], error: LaneLost) -> None:
        for task in tasks:
            with self._changed:
                self._tasks.pop(task.key, None)  # first: who waits may submit it again at once
            if task.future.running() or task.future.set_running_or_notify_cancel():
                task.future.set_exception(error)

    def _closed(self, judge: Judge) -> None:
        try:
            judge.close()
        except Exception as error:  # a new judge must not have to wait for the end of a broken one
            warnings.warn(f"a lane's judge did not close: {error!r}", RuntimeWarning, stacklevel=2)
