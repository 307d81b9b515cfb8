"""A rank's own store, which tells the others what it keeps and keeps what they tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forecast_autotune.ranks.board import Board
from forecast_autotune.ranks.shared_measurer import NOT_MEASURED
from forecast_autotune.records import Decision, Measurement, Problem, RiskVerdict
from forecast_autotune.surrogates.protocol import Relative
from forecast_autotune.tuning.guarded_store import GuardedStore

if TYPE_CHECKING:
    from forecast_autotune.llm.advice.record import Advice


class SharedStore:
    """A `TuningStore` for one decision that ranks make together."""

    def __init__(self, local: GuardedStore, board: Board) -> None:
        self._local, self._board = local, board

    def keeps(self, kind: type) -> bool:
        """Whether the rank's store is of this kind; see `GuardedStore.keeps`."""
        return self._local.keeps(kind)

    def measurements(self, problem: Problem) -> list[Measurement]:
        """What this rank's store holds of a problem."""
        found = self._local.measurements(problem)
        self._board.works = self._board.works or any(m.ok for m in found)
        return found

    def relatives(self, problem: Problem, limit: int = 8) -> list[Relative]:
        """The kernel's other problems in this rank's store."""
        return self._local.relatives(problem, limit)

    def add(self, problem: Problem, measurement: Measurement) -> None:
        """Keep a measurement; one of this rank's own is posted once it is safe here, so that none is lost."""
        if NOT_MEASURED in measurement.extra:
            return
        posted = self._board.rows.get(measurement.candidate)
        if posted is not None and same_run(posted, measurement):
            self.keep([measurement])
            return
        self.add_all(problem, [measurement])

    def add_all(self, problem: Problem, measurements: Sequence[Measurement]) -> None:
        """Keep measurements of this rank's own that belong together; those of which others know nothing are posted."""
        self._local.add_all(problem, measurements)
        for measurement in measurements:
            if measurement.candidate not in self._board.rows and measurement.outcome.is_label:
                self._board.post(measurement)

    def keep(self, measurements: Iterable[Measurement]) -> None:
        """Keep what other ranks measured, but for what is held: ranks may share a directory."""
        problem = self._board.problem
        held = self._local.measurements(problem)
        for measurement in measurements:
            if not any(same_run(known, measurement) for known in held):
                self._local.add(problem, measurement)

    def decision(self, problem: Problem) -> Decision | None:
        """The stored decision, if any."""
        return self._local.decision(problem)

    def put_decision(self, problem: Problem, decision: Decision) -> None:
        """Propose a decision to the job, and keep whichever the job takes."""
        if others := len(self._board.rows.keys() - self._board.own):
            decision = replace(decision, reason=f"{decision.reason}; {others} by other ranks")
        self._board.propose(decision)
        self._local.put_decision(problem, self._board.decision or decision)

    def verdicts(self, problem: Problem) -> list[RiskVerdict]:
        """What became of the risks stated on this problem's device class."""
        return self._local.verdicts(problem)

    def tuning_lock(self, problem: Problem, timeout_s: float) -> AbstractContextManager[bool]:
        """Hold the lock if it is free, so that processes of other jobs wait; ranks do not wait for each other."""
        return self._local.tuning_lock(problem, 0.0)

    def recover(self, problem: Problem) -> list[Measurement]:
        """Record candidates whose launch took a process down, and tell the others."""
        found = self._local.recover(problem)
        for m in found:
            self._board.post(m)
        return found

    def sync(self) -> None:
        """Make what was added survive a power cut."""
        self._local.sync()

    def facts(self, problem: Problem) -> Mapping[str, Any] | None:
        """What refits read of a problem, where the rank's store keeps any."""
        return self._local.facts(problem)

    def put_facts(self, problem: Problem, facts: Mapping[str, Any]) -> None:
        """Keep this instead, where the rank's store keeps any."""
        self._local.put_facts(problem, facts)

    def advice(self, source_sha256: str) -> Advice | None:
        """The advice on a kernel source, if the rank's store has any."""
        return self._local.advice(source_sha256)


def same_run(one: Measurement, other: Measurement) -> bool:
    """Whether two records tell of the same run of the same candidate."""
    return (one.candidate, one.outcome, one.median_ms, one.protocol, one.at) == (
        *(other.candidate, other.outcome, other.median_ms),
        *(other.protocol, other.at),
    )
