"""One decision for all ranks of a job: `tune_together` does what `tune` does, and shares the measuring.

Ranks never wait at a barrier. Each runs the whole loop by itself and looks at the problem's board (`ranks.board`)
as it goes: what others have measured is not measured again, what others are measuring is waited for like a
compilation of one's own, and the first rank that is satisfied decides for all. A rank that comes late finds the
decision; one that dies leaves its part to the others; one that meets the problem by itself tunes it by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from forecast_autotune.policy import Policy, WallTime
from forecast_autotune.ranks.board import Board
from forecast_autotune.ranks.job import Job
from forecast_autotune.ranks.shared_measurer import DecidedByAnotherRankError, SharedMeasurer
from forecast_autotune.ranks.shared_store import SharedStore
from forecast_autotune.records import Decision, Evidence, digest
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_autotune.telemetry.decision_span import DecisionSpan
from forecast_autotune.tuning.guarded_store import GuardedStore
from forecast_autotune.tuning.loop import tune
from forecast_autotune.tuning.measurer import Measurer
from forecast_autotune.tuning.task import TuningStore, TuningTask

_SHARED_MODES = (Mode.TUNE, Mode.EXHAUSTIVE)
_FORMAT = 1
"""Releases that write other entries use other boards."""


def tune_together(
    task: TuningTask,
    measurer: Callable[[], Measurer],
    *,
    store: TuningStore,
    surrogate: Surrogate,
    settings: Settings,
    policy: Policy | None = None,
    job: Job | None = None,
    patient: bool = True,
) -> Decision:
    """Decide one problem with the other ranks of `job`; as `tune` where there is none, or the mode times nothing.

    Unless `patient`, nothing is waited for: what other ranks have measured is used, what they are measuring is not.
    Raises what `tune` raises.
    """
    with DecisionSpan(task.problem, settings) as span:
        return span.conclude(_decide(task, measurer, store, surrogate, settings, policy, job, patient))


def _decide(
    task: TuningTask,
    measurer: Callable[[], Measurer],
    store: TuningStore,
    surrogate: Surrogate,
    settings: Settings,
    policy: Policy | None,
    job: Job | None,
    patient: bool,
) -> Decision:
    if job is None or job.left or job.size < 2 or settings.mode not in _SHARED_MODES:
        return tune(task, measurer, store=store, surrogate=surrogate, settings=settings, policy=policy)
    board = Board(job, task, board_name(task, settings, policy))
    store = GuardedStore(store)
    shared = SharedStore(store, board)
    board.read()
    if board.decision is not None:
        return _adopted(board, shared, store)
    budget = settings.budget.seconds
    wait_s = min(job.limits.wait_s, budget) if budget is not None else job.limits.wait_s

    def sharing() -> SharedMeasurer:
        return SharedMeasurer(measurer(), board, wait_s if patient else 0.0)

    try:
        with job.store.beating(job.beat_key):
            decision = tune(
                task, sharing, store=shared, surrogate=surrogate, settings=settings, policy=policy
            )
            if board.decision is None and decision.evidence is not Evidence.FORECAST:
                board.propose(decision)  # what this rank's store knew
    except DecidedByAnotherRankError:
        return _adopted(board, shared, store)
    if board.decision is None:
        return decision
    if board.decided_here:
        return replace(decision, reason=board.decision.reason)
    return _adopted(board, shared, store)


def board_name(task: TuningTask, settings: Settings, policy: Policy | None) -> str:
    """Names what ranks that share have in common: problem (device class and toolchain, too), candidates, settings."""
    mark = task.settings_digest(settings, policy or WallTime())
    return digest(_FORMAT, task.problem.id, mark, settings.mode, task.hears_failures)


def _adopted(board: Board, shared: SharedStore, store: TuningStore) -> Decision:
    """The job's decision, kept by this rank with what it rests on."""
    decision = board.decision
    assert decision is not None
    shared.keep(row for row in board.rows.values() if row.candidate not in board.own)
    if store.decision(board.problem) != decision:
        store.put_decision(board.problem, decision)
        store.sync()
    return replace(
        decision,
        evidence=Evidence.STORED,
        reason=f"decided by rank {board.decided_by}: {decision.reason}",
        known=decision.known + decision.measured,
        measured=0,
    )
