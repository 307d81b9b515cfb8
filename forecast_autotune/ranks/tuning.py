"""One decision for all ranks of a job: the first rank that claims a problem decides it, the others take its decision.

A claim is a key of the job's store that is written by compare-and-set. Its holder decides as without a job, gives
signs of life while it does, and writes the decision with the measurements below it, where the first one counts.
The others look for that, never at a barrier. A holder without a sign of life for `JobLimits.lease_s` seconds has lost
its claim to whoever asks next; a living one that measures nothing for `JobLimits.wait_s` seconds is not waited for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forecast_autotune.errors import NoWorkingConfigError, RecordError
from forecast_autotune.policy import Policy, WallTime
from forecast_autotune.ranks.job import Job
from forecast_autotune.records import Candidate, Decision, Evidence, Measurement, Outcome, Problem, digest
from forecast_autotune.records.bounded_json import decode_bounded
from forecast_autotune.records.json_fields import MALFORMED
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_autotune.telemetry.spans import DecisionSpan
from forecast_autotune.tuning.loop import GuardedStore, TuningTask, tune
from forecast_autotune.tuning.measurer import Measurer
from forecast_autotune.tuning.results import TuningStore

_SHARED_MODES = (Mode.TUNE, Mode.EXHAUSTIVE)
_FORMAT = 2
"""Releases that write other values use other keys."""
_FREE = "free"
"""In place of a holder's name: it gave the claim back."""
_LONGEST_ROW = 32768
"""Characters up to which a measurement is shared whole, else without extra fields. One has about a thousand."""
_LONGEST_RESULT = 1 << 24
"""Characters; longer ones are not read."""


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
    """Decide one problem once for the ranks of `job`; as `tune` where there is none, or the mode times nothing.

    Unless `patient`, nothing is waited for: a decision that is there is taken, another is made here.
    Raises what `tune` raises.
    """

    def decide(store: TuningStore = store, settings: Settings = settings) -> Decision:
        return tune(task, measurer, store=store, surrogate=surrogate, settings=settings, policy=policy)

    with DecisionSpan(task.problem, settings) as span:
        if job is None or job.left or job.size < 2 or settings.mode not in _SHARED_MODES:
            return span.conclude(decide())
        claim = Claim(job, task, settings, policy)
        seconds = settings.budget.seconds
        wait_s = job.limits.wait_s if seconds is None else min(job.limits.wait_s, seconds)
        return span.conclude(_decide(claim, decide, store, settings, wait_s if patient else 0.0))


def _decide(
    claim: Claim, decide: Callable[..., Decision], store: TuningStore, settings: Settings, wait_s: float
) -> Decision:
    reporter = _WatchedStore(store, claim)
    if (result := claim.acquire(wait_s)) is not None:
        return result.adopt(reporter) or decide(
            reporter
        )  # the latter says of what all ranks know that nothing works
    if not claim.held:
        settings = settings.with_(lock_timeout_s=0.0)  # the holder may have the lock
    problem = claim.task.problem
    try:
        with claim.job.store.beating(claim.beat_key):
            decision = decide(reporter, settings)
        if decision.is_kept:
            result = claim.conclude(decision, reporter.measurements(problem))
            return decision if result is None else result.adopt(reporter) or decision
        return decision
    except NoWorkingConfigError:
        if claim.held:
            claim.conclude(
                None, []
            )  # the others look for themselves, all at once rather than one after another
        raise
    finally:
        claim.release()


class _WatchedStore(GuardedStore):
    """A rank's own store, which reports progress to the waiting ranks with each measurement."""

    def __init__(self, store: TuningStore, claim: Claim) -> None:
        super().__init__(store)
        self._claim = claim

    def add(self, problem: Problem, measurement: Measurement) -> None:
        super().add(problem, measurement)
        self._claim.report_progress()


@dataclass(frozen=True)
class _Result:
    """Another rank's decision, or none where all its candidates failed, and the measurements below it."""

    problem: Problem
    rank: object
    decision: Decision | None
    rows: Sequence[Measurement]

    def adopt(self, store: GuardedStore) -> Decision | None:
        """Store the rows and the decision, if any, in this rank's store; returns the decision, marked as stored."""
        runs = set(map(_run, store.measurements(self.problem)))  # ranks may share a directory
        if missing := [row for row in self.rows if _run(row) not in runs]:
            store.add_all(self.problem, missing)
        if (decision := self.decision) is None:
            return None
        if store.decision(self.problem) != decision:
            store.put_decision(self.problem, decision)
        store.sync()
        return replace(
            decision,
            evidence=Evidence.STORED,
            reason=f"decided by rank {self.rank}: {decision.reason}",
            known=decision.known + decision.measured,
            measured=0,
        )


def _run(m: Measurement) -> tuple[object, ...]:
    """Names one run of one candidate, whichever store holds it."""
    return m.candidate, m.outcome, m.median_ms, m.protocol, m.at


class Claim:
    """A rank's claim on the decision of one problem. Without the job's store, no other rank seems to decide."""

    def __init__(self, job: Job, task: TuningTask, settings: Settings, policy: Policy | None) -> None:
        self.job, self.task = job, task
        name = problem_name(task, settings, policy)
        self._claim, self._result, self._progress = (
            f"{what}/{name}" for what in ("claim", "result", "progress")
        )
        self.held = False
        """Whether this rank is the one that decides."""
        self._count = 0

    @property
    def beat_key(self) -> str:
        """Where this process gives signs of life."""
        return _beat_key(self.job.name)

    def acquire(self, wait_s: float) -> _Result | None:
        """Claim the problem, or wait for its holder's result.

        Returns None where this rank is to decide: as the holder, or because the holder measured nothing for `wait_s`
        seconds, the job's store failed, or what stands there as the result is none.
        """
        job, limits = self.job, self.job.limits
        pause, last_look = limits.poll_s, job.now()
        holder = beat = progress = None
        alive_at = news_at = last_look
        try:
            while (text := job.store.get(self._result)) is None:
                standing = job.store.compare_set(self._claim, "", job.name)
                if self._holds(standing) or (standing == _FREE and self._takes_over(_FREE)):
                    return None
                now = job.now()
                if standing != holder:
                    holder, beat, progress, alive_at, news_at = standing, None, None, now, now
                if now - last_look >= limits.beat_s or wait_s <= 0:
                    last_look, before = now, (beat, progress)
                    beat, progress = job.store.get(_beat_key(holder)), job.store.get(self._progress)
                    alive_at = alive_at if beat == before[0] else now
                    news_at = news_at if progress == before[1] else now
                    if now - alive_at >= limits.lease_s and self._takes_over(holder):
                        return None
                    if now - news_at >= wait_s or wait_s <= 0:
                        return None
                job.sleep(pause)
                pause = min(1.5 * pause, limits.idle_poll_s)
            return self._read(text)
        except Exception as error:
            job.leave(error)
            return None

    def _takes_over(self, holder: str) -> bool:
        return self._holds(self.job.store.compare_set(self._claim, holder, self.job.name))

    def _holds(self, standing: str) -> bool:
        self.held = standing == self.job.name
        return self.held

    def report_progress(self) -> None:
        """Count a measurement for the waiting ranks."""
        self._count += 1
        if self.held and not self.job.left:
            try:
                self.job.store.set(self._progress, f"{self.job.name} {self._count}")
            except Exception as error:
                self.job.leave(error)

    def conclude(self, decision: Decision | None, rows: Sequence[Measurement]) -> _Result | None:
        """Make this the job's result, unless there is one, which is returned then."""
        if self.job.left:
            return None
        candidates = set(self.task.candidates)
        result = {
            "rank": self.job.rank,
            "decision": None if decision is None else decision.to_json(),
            "rows": [_row_json(m) for m in rows if m.outcome.is_label and m.candidate in candidates],
        }
        try:
            own = json.dumps(result)
            standing = self.job.store.compare_set(self._result, "", own)
        except Exception as error:
            self.job.leave(error)
            return None
        self.held = self.held and standing != own
        return None if standing == own else self._read(standing)

    def release(self) -> None:
        """Leave the decision to another rank, unless it is made."""
        if self.held and not self.job.left:
            self.held = False
            try:
                self.job.store.compare_set(self._claim, self.job.name, _FREE)
            except Exception as error:
                self.job.leave(error)

    def _read(self, text: str) -> _Result | None:
        try:
            if len(text) > _LONGEST_RESULT:
                raise RecordError(f"it has at most {_LONGEST_RESULT} characters, this has {len(text)}")
            data = decode_bounded(text, repair=True)
            own = {c.id: c for c in self.task.candidates}
            rows = [self._checked_row(row, own) for row in data["rows"]]
            decision = None
            if data["decision"] is not None:
                decision = Decision.from_json(data["decision"])
                chosen = self._checked(decision.problem, decision.chosen, own)
                if (
                    outcomes := [m.outcome for m in rows if m.candidate == chosen]
                ) and Outcome.OK not in outcomes:
                    raise RecordError(f"it chooses {chosen}, which failed: {outcomes[0]}")
                decision = replace(decision, chosen=chosen)
            return _Result(self.task.problem, data.get("rank", "?"), decision, rows)
        except MALFORMED as error:
            self.job.complain(error)
            return None

    def _checked_row(self, data: Any, own: Mapping[str, Candidate]) -> Measurement:
        m = Measurement.from_json(data)
        if not m.outcome.is_label:
            raise RecordError(f"outcome {m.outcome} says nothing of a candidate")
        return replace(m, candidate=self._checked(m.problem, m.candidate, own))

    def _checked(self, problem: str, candidate: Candidate, own: Mapping[str, Candidate]) -> Candidate:
        """The task's own record of a candidate."""
        if problem != self.task.problem.id:
            raise RecordError(f"it is about problem {problem!r:.60}, not {self.task.problem.id!r}")
        if candidate.id not in own:
            raise RecordError(f"{candidate!s:.120} is no candidate of problem {problem!r}")
        return own[candidate.id]


def _row_json(m: Measurement) -> dict[str, Any]:
    row = m.to_json()
    return row if len(json.dumps(row)) <= _LONGEST_ROW else replace(m, extra={}).to_json()


def _beat_key(name: str) -> str:
    return f"beat/{name}"


def problem_name(task: TuningTask, settings: Settings, policy: Policy | None) -> str:
    """A digest of problem (device class and toolchain, too), candidates and settings: equal on ranks that share."""
    mark = task.settings_digest(settings, policy or WallTime())
    return digest(_FORMAT, task.problem.id, mark, settings.mode, task.hears_failures)
