"""Carry a search out: start the actions of `pending_actions`, log every answer, and go on from there.

Proposers and forecasts have threads of their own, jobs have the lanes; all three work at once, and each is
given only a little more than it can do. Nothing is decided on an answer that is not in the log, and nothing
that is in it is asked again.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from forecast_autotune.errors import RecordError, SettingsError
from forecast_autotune.numerics import single_threaded_blas
from forecast_autotune.printable import utc_now
from forecast_autotune.records import Outcome
from forecast_harness.authors.author import Author
from forecast_harness.records import (
    ConfirmationJob,
    Node,
    NodeJob,
    ProposalRequest,
    Proposed,
    SearchContext,
    SearchSettings,
    SearchTarget,
    VerificationJob,
)
from forecast_harness.search.events import (
    Action,
    Confirmed,
    Event,
    Expired,
    Finished,
    Forecasted,
    Lost,
    NodeForecastRequest,
    RecordChoice,
    Resumed,
    Started,
    Stopped,
    StopSearch,
    Verified,
)
from forecast_harness.search.forecasters import Forecaster
from forecast_harness.search.log import SearchLog, decode, encode, read_log
from forecast_harness.search.output import write_best, write_output
from forecast_harness.search.plan import action_key, confirmation_reserve, open_archive, pending_actions
from forecast_harness.search.state import SearchState, apply_event, replay_events
from forecast_harness.targets.novelty import node_identity
from forecast_harness.targets.packs.schema import source_problem
from forecast_harness.trials.judge_pool import LocalJudgePool
from forecast_harness.trials.protocol import ConfirmationEnded, LaneFailure

MAX_PROPOSAL_REQUESTS = 8
"""Requests answered at once."""
JOBS_PER_LANE = 2
"""Jobs given to the lanes per lane: one at work, one waiting, so that none idles."""
INTERRUPT_GRACE_S = 10.0
"""Seconds in which results of work under way may still come in after an interruption."""
CANNOT_CONFIRM = "nothing that is found could be confirmed"
"""Begins the reason of a search that ends for that, as soon as it is known."""
LATE_SHARE = 0.2
"""Share of the wall-clock limit after which an author is late: idle lanes measure the sources of others meanwhile."""
POLL_INTERVAL_S = 0.2
"""Seconds after which an interruption is noticed while nothing comes in."""
LOG_FILE = "log.jsonl"


def search(
    target: SearchTarget,
    seeds: Sequence[Node],
    *,
    settings: SearchSettings,
    context: SearchContext,
    proposers: Mapping[str, Author],
    forecaster: Forecaster | None,
    lanes: LocalJudgePool,
    folder: Path,
    watch: Callable[[SearchState], None] | None = None,
    began: float | None = None,
) -> SearchState:
    """Search, or go on with the search in `folder`, to its end or to an interruption (Ctrl-C).

    `context` need not name settings, arms, seeds, target and surrogate: they are taken from the other
    arguments. `watch` sees the state after every event, in this thread. Closes none of what it is given.
    `began`: when, by `time.monotonic`, whoever waits for this search began to; the limit on seconds counts from there.

    Raises `RecordError` where the folder holds a search with another context, `StoreError` where it is in
    use or cannot be written, `SettingsError` for settings that cannot be searched with.
    """
    _check_settings(settings, seeds, proposers)
    context = replace(
        context,
        target=target.id,
        seeds=tuple(n.id for n in seeds),
        surrogate="none" if forecaster is None else forecaster.name,
        settings=settings,
        arms=tuple(f"{name}/{style}" for name, p in proposers.items() for style in p.styles),
    )
    path = folder / LOG_FILE
    if path.is_file() and read_log(path):
        log = SearchLog.open(path, context)
    else:
        log = SearchLog.create(path, Started(context, target, tuple(seeds), utc_now()))
    # Forecasts multiply small matrices; compilers of this search need the processors.
    with log, single_threaded_blas():
        state = replay_events(log.events)
        if state.stopped is None or state.stopped.interrupted:
            run = _SearchRunner(log, state, folder, proposers, forecaster, lanes, watch, began)
            if len(log.events) > 1:
                run.record(Resumed(utc_now()))
            with _interrupt_event() as interruption:
                run.run_to_end(interruption)
        write_output(state, folder)
        return state


def _check_settings(settings: SearchSettings, seeds: Sequence[Node], proposers: Mapping[str, Author]) -> None:
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
class _ActionInProgress:
    """An action under way."""

    action: Action
    future: Future[Event]
    lane_future: Future[Any] | None = None
    """The lanes' own future, through which a job is cancelled."""
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds that it has been under way."""
        return time.monotonic() - self.began


class _SearchRunner:
    """One process's part in a search."""

    def __init__(
        self,
        log: SearchLog,
        state: SearchState,
        folder: Path,
        proposers: Mapping[str, Author],
        forecaster: Forecaster | None,
        lanes: LocalJudgePool,
        watch: Callable[[SearchState], None] | None,
        began: float | None,
    ) -> None:
        self._log, self._state, self._folder = log, state, folder
        self._proposers, self._forecaster, self._lanes, self._watch = proposers, forecaster, lanes, watch
        self._in_progress: dict[str, _ActionInProgress] = {}
        self._late: dict[str, list[_ActionInProgress]] = {}
        """By arm: requests that their batch went on without. Their answers are those to the arm's next requests."""
        self._best = ""
        self._started_at = time.monotonic()
        self._wait_seconds = 0.0 if began is None else max(0.0, self._started_at - began)
        """Seconds before this part of the search, in which what it needs was opened."""
        self._earlier_seconds = state.spent.wall_seconds
        """Wall seconds of work in earlier sessions; no more is known: a killed one tells no end."""

    def record(self, event: Event) -> None:
        """Log an event, then apply it to the state."""
        apply_event(self._state, self._log.append(event))
        if self._state.best != self._best:
            self._best = self._state.best
            write_best(self._state, self._folder)
        if self._watch is not None:
            self._watch(self._state)

    def run_to_end(self, interruption: threading.Event) -> None:
        """Go on until `Stopped`, or until there is an interruption."""
        try:
            while self._state.stopped is None and not interruption.is_set():
                self._step(interruption)
            if self._state.stopped is None:
                self._end_early()
        finally:
            self._cancel()

    def _step(self, interruption: threading.Event) -> None:
        """Do what is due; wait for an answer where nothing else is left to do."""
        if self._time_is_up():
            self._record_answers()
            self.record(Expired(self._elapsed_seconds(), at=utc_now()))
            self._give_up()
        if problem := self._lanes.problem:
            self._give_up()
            return self.record(Stopped(f"{CANNOT_CONFIRM}: {problem}", at=utc_now()))
        for action in pending_actions(self._state):
            if isinstance(action, RecordChoice):
                return self.record(action.event)
            if isinstance(action, StopSearch):
                return self.record(Stopped(action.reason, at=utc_now()))
            name = action_key(action)
            if name in self._in_progress:
                continue
            if isinstance(action, ConfirmationJob) and self._in_progress:
                self._give_up()  # a verification: all finalists are verified again
            if self._has_room(action):
                self._in_progress[name] = self._start(action)
        if not self._in_progress:
            raise RuntimeError("nothing is due and nothing is under way, and yet the search has not stopped")
        while not (
            self._record_answers()
            or interruption.is_set()
            or self._time_is_up()
            or self._lanes.problem
            or self._pass_over_late()
        ):
            wait([a.future for a in self._in_progress.values()], POLL_INTERVAL_S, FIRST_COMPLETED)
        return None

    def _record_answers(self) -> bool:
        """Record all answers that have come; whether there were any."""
        names = [name for name, task in self._in_progress.items() if task.future.done()]
        for name in names:
            event = self._in_progress.pop(name).future.result()
            self.record(event)
        return bool(names)

    def _pass_over_late(self) -> bool:
        """Go on without late authors where only they keep sources of others from being measured; whether there were."""
        state, limit = self._state, self._state.settings.budget.wall_seconds
        requests = {
            n: a.action for n, a in self._in_progress.items() if isinstance(a.action, ProposalRequest)
        }
        answers = [a for r in requests.values() for a in state.batch(r.batch).answers.values() if a.nodes]
        if limit is None or len(requests) < len(self._in_progress) or not (answers or state.pool):
            return False
        late = {n: r for n, r in requests.items() if self._in_progress[n].seconds >= LATE_SHARE * limit}
        for name, request in late.items():
            self._late.setdefault(request.arm, []).append(task := self._in_progress.pop(name))
            problem = f"{request.arm.partition('/')[0]}: no answer in {task.seconds:.0f} s"
            self.record(plugin_event(request, failed_answer(request, problem)))
        return bool(late)

    def _elapsed_seconds(self) -> float:
        return self._earlier_seconds + self._wait_seconds + time.monotonic() - self._started_at

    def _time_is_up(self) -> bool:
        """Whether just enough of the wall-clock limit is left to confirm the best."""
        state, limit = self._state, self._state.settings.budget.wall_seconds
        if limit is None or state.expired is not None:
            return False
        seconds = self._elapsed_seconds()
        if state.seeds[0] not in state.judged:  # without it nothing is known, however long opening took
            seconds -= self._wait_seconds
        # A verification under way shows, too, how long the best takes to verify.
        going = [a.seconds for a in self._in_progress.values() if isinstance(a.action, VerificationJob)]
        least = max(going, default=0.0)
        return seconds >= limit - confirmation_reserve(state, limit, least)

    def _has_room(self, action: Action) -> bool:
        """Whether fewer of such actions are under way than may be."""
        under_way = sum(type(a.action) is type(action) for a in self._in_progress.values())
        if isinstance(action, VerificationJob):
            return under_way == 0
        most = JOBS_PER_LANE * max(1, self._lanes.capacity)
        return under_way < (most if isinstance(action, NodeJob) else MAX_PROPOSAL_REQUESTS)

    def _end_early(self) -> None:
        """Cancel what has not begun, give the rest a little time, and say that there is more to do."""
        self._cancel()
        if self._in_progress:
            print("interrupted: work under way may still come in; Ctrl-C again ends it", file=sys.stderr)
        wait([a.future for a in self._in_progress.values()], INTERRUPT_GRACE_S)
        for task in self._in_progress.values():
            if task.future.done() and not isinstance(event := task.future.result(), Lost):
                self.record(event)
        self._in_progress.clear()
        self.record(Stopped("interrupted by the user", interrupted=True, at=utc_now()))

    def _cancel(self) -> None:
        for task in self._in_progress.values():
            if task.lane_future is not None:
                task.lane_future.cancel()

    def _give_up(self) -> None:
        """End the judges' work unless it is a confirmation: other results come too late, and that needs the device."""
        if any(isinstance(a.action, ConfirmationJob) for a in self._in_progress.values()):
            return  # a confirmation is under way alone
        self._cancel()
        self._lanes.give_up()
        # Work of plug-ins may be paid for: it is booked if it comes in time.
        self._in_progress = {n: a for n, a in self._in_progress.items() if a.lane_future is None}

    # --- asking ---

    def _start(self, action: AwaitedAction) -> _ActionInProgress:
        """Start an action; its future gives the event."""
        future: Future[Event] = Future()
        if isinstance(action, ProposalRequest) and (late := self._late.get(action.arm)):
            earlier = late.pop(0)
            earlier.future.add_done_callback(
                lambda f: _resolve(future, lambda: plugin_event(action, f.result()))
            )
            return _ActionInProgress(action, future, began=earlier.began)
        if not isinstance(action, ProposalRequest | NodeForecastRequest):
            lane_future: Future[Any] = (
                self._lanes.confirm(action)
                if isinstance(action, ConfirmationJob)
                else self._lanes.verify(action)
                if isinstance(action, VerificationJob)
                else self._lanes.submit(action)
            )
            lane_future.add_done_callback(lambda f: _resolve(future, lambda: _answer_of_lane(action, f)))
            return _ActionInProgress(action, future, lane_future)
        make = partial(self._answer_of_plugin, action)
        # A daemon: a plug-in that hangs must not keep the process from ending.
        threading.Thread(
            target=_resolve, args=(future, make), name=f"search-{action_key(action)}", daemon=True
        ).start()
        return _ActionInProgress(action, future)

    def _answer_of_plugin(self, action: ProposalRequest | NodeForecastRequest) -> Event:
        answer = ask_plugin(action, self._proposers, self._forecaster)
        try:
            return _round_trip(plugin_event(action, answer))
        except (ValueError, TypeError, AttributeError) as error:
            problem = f"the answer is not what was asked for: {error}"[:500]
            return plugin_event(action, failed_answer(action, problem))


def _answer_of_lane(action: LaneAction, future: Future[Any]) -> Event:
    """The event of a lane's result. Runs in the lane's thread, as soon as the result is there."""
    try:
        if future.cancelled():
            raise LaneFailure("cancelled")
        return _round_trip(judge_event(action, future.result()))
    except LaneFailure as error:
        return lane_failure_event(action, error)
    except (ValueError, TypeError, AttributeError) as error:
        return lane_failure_event(
            action, LaneFailure(f"the judge's answer is not what was asked for: {error}"[:500])
        )


def _round_trip(event: Event) -> Event:
    """The event as its line reads. Raises `RecordError` for values that JSON cannot hold."""
    return decode(encode(event))


def _resolve(future: Future[Event], make: Callable[[], Event]) -> None:
    try:
        future.set_result(make())
    except BaseException as error:
        future.set_exception(error)


@contextmanager
def _interrupt_event() -> Iterator[threading.Event]:
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


# --- from answers to events: booked under what was asked, never trusted to be well formed ---


LaneAction: TypeAlias = NodeJob | VerificationJob | ConfirmationJob
"""The actions that a judge answers."""
AwaitedAction: TypeAlias = ProposalRequest | NodeForecastRequest | LaneAction
"""The actions that somebody answers."""


def ask_plugin(
    action: ProposalRequest | NodeForecastRequest,
    proposers: Mapping[str, Author],
    forecaster: Forecaster | None,
) -> Event:
    """Ask the proposer that the request's arm names, or the forecaster; errors are told in the answer."""
    try:
        if isinstance(action, ProposalRequest):
            return _without_unusable_nodes(proposers[action.arm.partition("/")[0]].propose(action))
        if forecaster is None:
            raise LookupError("there is no forecaster")
        return forecaster.forecast(action)
    except Exception as error:  # whatever a plug-in does, the search goes on
        return failed_answer(action, f"{type(error).__name__}: {error}"[:500])


def _without_unusable_nodes(answer: Proposed) -> Proposed:
    """The answer without sources that cannot be kept in a file or looked at; `problem` says which."""
    problems = {node.id: reasons for node in answer.nodes if (reasons := source_problem(node.source))}
    if not problems:
        return answer
    reasons = "; ".join([*([answer.problem] if answer.problem else []), *dict.fromkeys(problems.values())])
    nodes = tuple(node for node in answer.nodes if node.id not in problems)
    return replace(answer, nodes=nodes, problem=f"{len(problems)} sources were left out: {reasons}"[:500])


def failed_answer(action: ProposalRequest | NodeForecastRequest, problem: str) -> Event:
    """The answer in place of one that a plug-in did not give."""
    if isinstance(action, ProposalRequest):
        return Proposed(action.id, (), problem=problem)
    return Forecasted(action.batch, action.reference.id, {}, problem=problem)


def judge_event(action: LaneAction, result: Any) -> Event:
    """The event of a judge's answer: under the action's own names, without what was not asked for.

    Where time was limited, a word on the first finalist will do. A verification whose outcome is `infrastructure` is
    one of a suspicious node, which is done with: a judge tells its own failures by raising. Raises `LaneFailure` for
    any other result of that outcome, and for no word on a node that was asked for.
    """
    if isinstance(action, VerificationJob):
        return Verified(action.id, action.node.id, result)
    if isinstance(action, ConfirmationJob):
        nodes = action.nodes if action.seconds is None else action.nodes[:1]
        if missing := [n.id for n in nodes if n.id not in result]:
            raise LaneFailure(f"the judge says nothing of {', '.join(missing)}")
    for node_result in [result] if isinstance(action, NodeJob) else result.values():
        if node_result.outcome is Outcome.INFRASTRUCTURE:
            raise LaneFailure(node_result.feedback or "the harness failed", node_result.device)
    if isinstance(action, NodeJob):
        own = replace(result, against=action.against.id)
        return Finished(action.id, action.node.id, action.batch, own)
    ids = {n.id for n in (*action.nodes, action.seed_node)}
    return Confirmed({n: replace(j, against=action.seed_node.id) for n, j in result.items() if n in ids})


def plugin_event(action: ProposalRequest | NodeForecastRequest, answer: Event) -> Event:
    """The event of an author's or a forecaster's answer: under the action's own names, without what was not asked for.

    Raises `RecordError` for an answer to something else.
    """
    if isinstance(action, ProposalRequest) and isinstance(answer, Proposed):
        return replace(
            answer,
            request=action.id,
            batch=action.batch,
            arm=action.arm,
            parent=action.parents[0].id,
            nodes=tuple(_normalize_node(node, action) for node in answer.nodes),
        )
    if isinstance(action, NodeForecastRequest) and isinstance(answer, Forecasted):
        ids = {n.id for n in action.nodes}
        beliefs = {n: b for n, b in answer.beliefs.items() if n in ids}
        return replace(answer, batch=action.batch, reference=action.reference.id, beliefs=beliefs)
    raise RecordError(f"a {type(answer).__name__} does not answer a {type(action).__name__}")


def lane_failure_event(action: LaneAction, error: LaneFailure) -> Lost:
    """The event of a failed lane."""
    if isinstance(action, VerificationJob):
        return Lost(action.id, action.node.id, 0, str(error), error.lane, verification=True)
    if isinstance(action, NodeJob):
        return Lost(action.id, action.node.id, action.batch, str(error), error.lane)
    final = isinstance(error, ConfirmationEnded)
    return Lost(action_key(action), "", 0, str(error), error.lane, final=final)


def _normalize_node(node: Node, request: ProposalRequest) -> Node:
    """A proposal as the search books it: by its own text, below parents that it can have."""
    ids = {p.id for p in request.parents}
    return replace(
        node,
        id=node_identity(request.target.id, node.language, node.source),
        parents=tuple(p for p in node.parents if p in ids) or (request.parents[0].id,),
        arm=request.arm,
        batch=request.batch,
        request=request.id,
    )
