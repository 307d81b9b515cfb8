"""A store whose faults cost a warning and what it would have remembered, never a decision."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from forecast_autotune.errors import is_of_caller
from forecast_autotune.records import Candidate, Decision, Measurement, Problem, RiskVerdict
from forecast_autotune.surrogates.protocol import Relative

if TYPE_CHECKING:
    from forecast_autotune.llm.advice.record import Advice
    from forecast_autotune.store.misses import Miss
    from forecast_autotune.tuning.task import TuningStore

Answer = TypeVar("Answer")


class GuardedStore:
    """Another store's answers or, where it raises, those of an empty one, with one warning.

    A measurement that could not be added is remembered here, so that it counts for this decision.
    """

    def __init__(self, store: TuningStore) -> None:
        self._store = store
        self._warned = False
        self._kept: list[Measurement] = []

    def _ask(self, method: str, otherwise: Callable[[], Answer], *args: Any) -> Answer:
        try:
            call: Callable[..., Answer] | None = getattr(self._store, method, None)
            # Facts and advice are more than a store must have.
            return otherwise() if call is None else call(*args)
        except Exception as error:
            if is_of_caller(error):
                raise
            self._warn(error)
            return otherwise()

    def keeps(self, kind: type) -> bool:
        """Whether the store itself is of a kind that no store must be: `FactStore`, `AdviceStore` or `MissStore`.

        This one has their methods whatever it guards.
        """
        passed_on: Callable[[type], bool] | None = getattr(self._store, "keeps", None)
        return isinstance(self._store, kind) if passed_on is None else passed_on(kind)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"the store failed ({error!r:.300}): going on without it", stacklevel=4)

    def measurements(self, problem: Problem) -> list[Measurement]:
        """As `TuningStore`."""
        kept = [m for m in self._kept if m.problem == problem.id]
        return self._ask("measurements", list, problem) + kept

    def relatives(self, problem: Problem, limit: int = 8) -> list[Relative]:
        """As `TuningStore`."""
        return self._ask("relatives", list, problem, limit)

    def add(self, problem: Problem, measurement: Measurement) -> None:
        """As `TuningStore`."""
        self._ask("add", lambda: self._kept.append(measurement), problem, measurement)

    def add_all(self, problem: Problem, measurements: Sequence[Measurement]) -> None:
        """As `TuningStore`; one by one where a user's own store has nothing else."""
        if hasattr(self._store, "add_all"):
            self._ask("add_all", lambda: self._kept.extend(measurements), problem, measurements)
            return
        for measurement in measurements:
            self.add(problem, measurement)

    def decision(self, problem: Problem) -> Decision | None:
        """As `TuningStore`."""
        return self._ask("decision", lambda: None, problem)

    def put_decision(self, problem: Problem, decision: Decision) -> None:
        """As `TuningStore`."""
        self._ask("put_decision", lambda: None, problem, decision)

    def verdicts(self, problem: Problem) -> list[RiskVerdict]:
        """As `TuningStore`."""
        return self._ask("verdicts", list, problem)

    def tuning_lock(self, problem: Problem, timeout_s: float) -> contextlib.AbstractContextManager[bool]:
        """As `TuningStore`."""
        return self._entered(self._ask("tuning_lock", contextlib.nullcontext, problem, timeout_s))

    def watch(self, problem: Problem, candidate: Candidate) -> contextlib.AbstractContextManager[bool]:
        """As `Store.watch`."""
        return self._entered(self._ask("watch", contextlib.nullcontext, problem, candidate))

    @contextlib.contextmanager
    def _entered(self, context: contextlib.AbstractContextManager[object]) -> Iterator[bool]:
        """The block runs whatever becomes of its context; yields False where that could not be had."""
        try:
            held = bool(context.__enter__())
        except Exception as error:
            self._warn(error)
            yield False
            return
        try:
            yield held
        finally:
            try:
                context.__exit__(None, None, None)
            except Exception as error:
                self._warn(error)

    def recover(self, problem: Problem) -> list[Measurement]:
        """As `TuningStore`."""
        return self._ask("recover", list, problem)

    def sync(self) -> None:
        """As `TuningStore`."""
        self._ask("sync", lambda: None)

    def facts(self, problem: Problem) -> Mapping[str, Any] | None:
        """As `FactStore`."""
        return self._ask("facts", lambda: None, problem)

    def put_facts(self, problem: Problem, facts: Mapping[str, Any]) -> None:
        """As `FactStore`."""
        self._ask("put_facts", lambda: None, problem, facts)

    def add_miss(self, miss: Miss) -> None:
        """As `MissStore`."""
        self._ask("add_miss", lambda: None, miss)

    def advice(self, source_sha256: str) -> Advice | None:
        """As `AdviceStore`."""
        return self._ask("advice", lambda: None, source_sha256)
