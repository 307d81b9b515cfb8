"""Carry a search out: ask what `decide.pending` says, write every answer down, go on from there.

Proposers and forecasts have threads of their own, jobs have the lanes; all three work at once, and each is
given only a little more than it can do. Nothing is decided on an answer that is not in the log. What was
asked is asked once: answers are files (`answers`) before they are lines of the log.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from forecast_autotune.errors import SettingsError
from forecast_autotune.tuning.task import now
from forecast_harness.search.answers import Answers
from forecast_harness.search.archives import open_archive
from forecast_harness.search.decide import RESERVE, key, pending
from forecast_harness.search.events import (
    Action,
    Choose,
    Confirm,
    Event,
    Expired,
    Job,
    Lost,
    Question,
    Request,
    Resumed,
    Started,
    Stop,
    Stopped,
)
from forecast_harness.search.interfaces import Forecaster, LaneLost, Lanes, Proposer
from forecast_harness.search.log import Log, read
from forecast_harness.search.output import write_best, write_output
from forecast_harness.search.records import Context, Node, Settings, Target
from forecast_harness.search.state import State, apply, fold
from forecast_harness.search.work import Asking, asked, booked, failed, lost, received

PROPOSING = 8
"""Requests answered at once."""
AHEAD = 2
"""Jobs given to the lanes per lane: one at work, one waiting, so that none idles."""
GRACE_S = 10.0
"""How long work under way may still come in after an interruption."""
POLL_S = 0.2
"""How soon an interruption is noticed while nothing comes in."""
LOG = "log.jsonl"


def search(
    target: Target,
    seeds: Sequence[Node],
    *,
    settings: Settings,
    context: Context,
    proposers: Mapping[str, Proposer],
    forecaster: Forecaster | None,
    lanes: Lanes,
    folder: Path,
    watch: Callable[[State], None] | None = None,
) -> State:
    """Search, or go on with the search in `folder`, to its end or to an interruption (Ctrl-C).

    `context` need not name settings, arms, seeds, target and surrogate: they are taken from the other
    arguments. `watch` sees the state after every event, in this thread. Closes none of what it is given.

    Raises `RecordError` where the folder holds a search with another context, `StoreError` where it is in
    use or cannot be written, `SettingsError` for settings that cannot be searched with.
    """
    _check(settings, seeds, proposers)
    context = replace(
        context,
        target=target.id,
        seeds=tuple(n.id for n in seeds),
        surrogate="none" if forecaster is None else forecaster.name,
        settings=settings,
        arms=tuple(f"{name}/{style}" for name, p in proposers.items() for style in p.styles),
    )
    path = folder / LOG
    if path.is_file() and read(path):
        log = Log.open(path, context)
    else:
        log = Log.create(path, Started(context, target, tuple(seeds), now()))
    with log:
        state = fold(log.events)
        if state.stopped is None or state.stopped.interrupted:
            run = _Run(log, state, folder, proposers, forecaster, lanes, watch)
            if len(log.events) > 1:
                run.record(Resumed(now()))
            with _interruption() as interrupted:
                run.to_the_end(interrupted)
        write_output(state, folder)
        return state


def _check(settings: Settings, seeds: Sequence[Node], proposers: Mapping[str, Proposer]) -> None:
    open_archive(settings.archive)
    least = {"parents": 1, "samples": 1, "k": 1, "depth": 1, "patience": 1, "trials": 0}
    for name, number in least.items():
        if getattr(settings, name) < number:
            raise SettingsError(f"{name} must be at least {number}, not {getattr(settings, name)}")
    if not 0.0 <= settings.audit <= 1.0:
        raise SettingsError(f"audit is a share of the measurements, 0 to 1, not {settings.audit}")
    if not seeds:
        raise SettingsError("a search needs a seed: a source to start from, and to compare with")
    if not any(p.styles for p in proposers.values()):
        raise SettingsError("a search needs a proposer with at least one style")


@dataclass
class _Asked:
    """An action under way."""

    action: Action
    future: Future[Event]
    theirs: Future[Any] | None = None
    """The lanes' own, to cancel it by."""


class _Run:
    """One process's part in a search."""

    def __init__(
        self,
        log: Log,
        state: State,
        folder: Path,
        proposers: Mapping[str, Proposer],
        forecaster: Forecaster | None,
        lanes: Lanes,
        watch: Callable[[State], None] | None,
    ) -> None:
        self._log, self._state, self._folder, self._answers = log, state, folder, Answers(folder)
        self._proposers, self._forecaster, self._lanes, self._watch = proposers, forecaster, lanes, watch
        self._asked: dict[str, _Asked] = {}
        self._best = ""
        self._begun = time.monotonic()
        self._before = state.spent.wall_seconds
        """Of earlier sessions only their work is known: a killed one tells no end."""

    def record(self, event: Event) -> None:
        """Log, then know."""
        apply(self._state, self._log.append(event))
        if self._state.best != self._best:
            self._best = self._state.best
            write_best(self._state, self._folder)
        if self._watch is not None:
            self._watch(self._state)

    def to_the_end(self, interrupted: threading.Event) -> None:
        """Until `Stopped`, or until there is an interruption."""
        try:
            while self._state.stopped is None and not interrupted.is_set():
                self._step(interrupted)
            if self._state.stopped is None:
                self._end_early()
        finally:
            self._cancel()

    def _step(self, interrupted: threading.Event) -> None:
        """Do what is due; wait for an answer where nothing else is left to do."""
        if self._time_is_up():
            self.record(Expired(self._elapsed(), at=now()))
            self._cancel()
        for action in pending(self._state):
            if isinstance(action, Choose):
                return self.record(action.event)
            if isinstance(action, Stop):
                return self.record(Stopped(action.reason, at=now()))
            name = key(action)
            if name in self._asked:
                continue
            if (kept := self._kept(name, action)) is not None:
                return self.record(kept)
            if self._has_room(action):
                self._asked[name] = self._ask(name, action)
        if not self._asked:
            raise RuntimeError("nothing is due and nothing is under way, and yet the search has not stopped")
        while not self._take_in() and not interrupted.is_set() and not self._time_is_up():
            wait([a.future for a in self._asked.values()], POLL_S, FIRST_COMPLETED)
        return None

    def _kept(self, name: str, action: Asking) -> Event | None:
        """The event of an answer on file."""
        answer = self._answers.kept(name)
        try:
            return booked(action, answer) if answer is not None else None
        except ValueError:
            return None

    def _take_in(self) -> bool:
        """Record all answers that have come; whether there were any."""
        done = [name for name, ours in self._asked.items() if ours.future.done()]
        for name in done:
            event = self._asked.pop(name).future.result()
            # What was given up when the time was up is no lane's failure.
            if self._state.expired is None or not isinstance(event, Lost) or not event.node:
                self.record(event)
        return bool(done)

    def _elapsed(self) -> float:
        return self._before + time.monotonic() - self._begun

    def _time_is_up(self) -> bool:
        """Whether just enough of the wall-clock limit is left to confirm the best."""
        limit = self._state.settings.budget.wall_seconds
        if limit is None or self._state.expired is not None:
            return False
        return self._elapsed() >= (1.0 - RESERVE) * limit

    def _has_room(self, action: Action) -> bool:
        """Whether its queue is not full."""
        under_way = sum(type(a.action) is type(action) for a in self._asked.values())
        return under_way < (AHEAD * max(1, self._lanes.width) if isinstance(action, Job) else PROPOSING)

    def _end_early(self) -> None:
        """Cancel what has not begun, give the rest a little time, and say that there is more to do."""
        self._cancel()
        wait([a.future for a in self._asked.values()], GRACE_S)
        for ours in self._asked.values():
            if ours.future.done() and not isinstance(event := ours.future.result(), Lost):
                self.record(event)
        self._asked.clear()
        self.record(Stopped("interrupted by the user", interrupted=True, at=now()))

    def _cancel(self) -> None:
        for ours in self._asked.values():
            if ours.theirs is not None:
                ours.theirs.cancel()

    # --- asking ---

    def _ask(self, name: str, action: Asking) -> _Asked:
        """Start it. The future gives the event, which is in its file by then."""
        future: Future[Event] = Future()
        if isinstance(action, Job | Confirm):
            theirs: Future[Any] = (
                self._lanes.confirm(action) if isinstance(action, Confirm) else self._lanes.submit(action)
            )
            theirs.add_done_callback(lambda done: _settle(future, lambda: self._judged(name, action, done)))
            return _Asked(action, future, theirs)
        make = partial(self._answered, name, action)
        # A daemon: a plug-in that hangs must not keep the process from ending.
        threading.Thread(target=_settle, args=(future, make), name=f"search-{name}", daemon=True).start()
        return _Asked(action, future)

    def _answered(self, name: str, action: Request | Question) -> Event:
        answer = asked(action, self._proposers, self._forecaster)
        try:
            self._answers.keep(name, answer)
            return booked(action, answer)
        except (ValueError, TypeError, AttributeError) as error:
            answer = failed(action, f"the answer is not what was asked for: {error}"[:500])
            self._answers.keep(name, answer)
            return booked(action, answer)

    def _judged(self, name: str, action: Job | Confirm, done: Future[Any]) -> Event:
        """In the lane's thread, as soon as the result is there."""
        try:
            if done.cancelled():
                raise LaneLost("cancelled")
            answer = received(action, done.result())
            self._answers.keep(name, answer)
            return booked(action, answer)
        except LaneLost as error:
            return lost(action, error)
        except (ValueError, TypeError, AttributeError) as error:
            return lost(action, LaneLost(f"the judge's answer is not what was asked for: {error}"[:500]))


def _settle(future: Future[Event], make: Callable[[], Event]) -> None:
    try:
        future.set_result(make())
    except BaseException as error:
        future.set_exception(error)


@contextmanager
def _interruption() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets, at a moment that breaks nothing; the second one is as ever."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
