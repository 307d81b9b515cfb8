"""Measurements of one task, from before its decision and in it, and the finalists among them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.records import Candidate, Decision, Measurement, Outcome, Problem, RiskVerdict
from forecast_autotune.records.table import comparable, latest_labels
from forecast_autotune.surrogates.protocol import Relative

MAX_FINALISTS = 4
"""How many of the fastest are timed again side by side; three times as many where they may tie."""
FINALIST_MARGIN = 0.06
"""Share by which a finalist may be slower than the fastest: a larger gap cannot be a matter of noise."""
ORACLE_FINALIST_MARGIN = 0.12
"""The same where everything is measured, for any number of them: an oracle must not be a matter of luck."""
PROBABLE_TIE = 0.015
"""Share by which single timings of one config may differ: candidates this close are compared first."""
LOOK_ERROR_MS = 3e-4
"""Milliseconds by which single timings differ besides, however short they are: two configs tie that differ by less."""
NEGLIGIBLE_GAIN = 0.01
"""Share of run time below which two configs tie: half of the usual tolerance, whose rest is for untimed candidates.

Far more than the error of a comparison in turns, so that this error decides few ties."""

_TRANSIENT_FAILURES = frozenset((Outcome.COMPILE_ERROR, Outcome.OUT_OF_RESOURCES))
"""Outcomes that point to the machine rather than to a candidate, where every candidate has them."""
# Parts of a driver's message for a call that no config can launch.
_CALL_ERRORS = ("invalid argument", "invalid configuration")


class TuningStore(Protocol):
    """The part of a store that the tuner uses."""

    def measurements(self, problem: Problem) -> list[Measurement]:
        """Everything measured of a problem."""
        ...

    def relatives(self, problem: Problem, limit: int = 8) -> list[Relative]:
        """The same kernel's other problems, most similar first."""
        ...

    def add(self, problem: Problem, measurement: Measurement) -> None:
        """Commit one measurement; on return a kill cannot lose it."""
        ...

    def add_all(self, problem: Problem, measurements: Sequence[Measurement]) -> None:
        """Commit measurements that belong together: a kill leaves all of them or none."""
        ...

    def decision(self, problem: Problem) -> Decision | None:
        """The stored decision, if any."""
        ...

    def put_decision(self, problem: Problem, decision: Decision) -> None:
        """Replace the stored decision."""
        ...

    def verdicts(self, problem: Problem) -> list[RiskVerdict]:
        """Return the verdicts on risks stated on this problem's device class."""
        ...

    def tuning_lock(self, problem: Problem, timeout_s: float) -> AbstractContextManager[bool]:
        """The right to tune a problem, among processes; yields whether it is held."""
        ...

    def recover(self, problem: Problem) -> list[Measurement]:
        """Record candidates whose launch took a process down."""
        ...

    def sync(self) -> None:
        """Make what was added survive a power cut."""
        ...


class TaskResults:
    """Measurements of one task's candidates. Every one added is in the store first."""

    def __init__(self, store: TuningStore, problem: Problem, candidates: CandidateList) -> None:
        self.problem = problem
        """The problem that measurements are stored under."""
        rows = [m for m in store.measurements(problem) if m.candidate in candidates.row_of]
        self.rows = comparable(rows)
        """All measurements that count, in order."""
        self.labels = latest_labels(self.rows)
        """The latest measurement per candidate, without infrastructure faults."""
        if len(self.labels) == len(candidates) and not any(m.ok for m in self.labels.values()):
            self._doubt_failures()
        self._earlier_rows = tuple(self.rows)
        """Rows from before this decision."""
        self.known = len(self.labels)
        """Number of labels from before this decision."""
        self.tried: dict[Candidate, Measurement] = {}
        """Measurements of this decision, infrastructure faults included."""
        self._store, self._row_of = store, candidates.row_of
        self._cache_state = ""
        """Cache state of this decision's latest time."""
        self._finalists: set[Candidate] = set()

    def _doubt_failures(self) -> None:
        """Forget failures that a machine may have mended, where all candidates have failed.

        A full disk, a broken compiler or a wrong call looks alike for all of them. Candidates that hung or broke the
        device are not tried again.
        """
        sure = [m for m in self.rows if m.outcome not in _TRANSIENT_FAILURES]
        self.rows = [m for m in sure if not any(t in str(m.extra.get("message", "")) for t in _CALL_ERRORS)]
        self.labels = latest_labels(self.rows)

    def add(self, m: Measurement) -> None:
        """Commit one measurement of this decision."""
        self._store.add(self.problem, m)
        self.rows.append(m)
        self.tried[m.candidate] = m
        if m.cache_state != self._cache_state and m.cache_state:
            self.rows, self._cache_state = comparable(self.rows), m.cache_state
            self.labels = latest_labels(self.rows)
        elif m.outcome.is_label:
            self.labels[m.candidate] = m

    def add_comparison(self, timed: Sequence[Measurement]) -> None:
        """Commit times of a comparison side by side: the winner is one of these, as only they were timed alike."""
        self._store.add_all(self.problem, timed)
        self.rows += timed
        self._finalists.update(m.candidate for m in timed)
        self.labels = latest_labels(self.rows)

    def resume_comparison(self, close: Sequence[Candidate]) -> bool:
        """Whether an earlier process compared these, and ended before it stored its decision; if so, they become the
        finalists.
        """
        upwards = itertools.dropwhile(lambda m: not m.in_turns, reversed(self._earlier_rows))
        last = {id(m) for m in itertools.takewhile(lambda m: m.in_turns, upwards)}
        if not all(id(self.labels[c]) in last for c in close):
            return False
        self._finalists.update(close)
        return True

    def faults(self) -> list[Measurement]:
        """Return what a broken harness kept from being tried in this decision, and nobody has measured before."""
        faults = [m for m in self.tried.values() if m.outcome is Outcome.INFRASTRUCTURE]
        return [m for m in faults if m.candidate not in self.labels]

    def outcomes(self) -> dict[Candidate, Measurement]:
        """Return an outcome per candidate; one that met a broken harness has no label, but is not tried again now."""
        return {**self.tried, **self.labels}

    def fastest(self) -> list[Measurement]:
        """Measurements with a time, fastest first; ties go to the earlier candidate, as in Triton."""
        final = self._finalists
        successes = [m for m in self.labels.values() if m.ok and (not final or m.candidate in final)]
        return sorted(
            successes, key=lambda m: (m.ms, m.p20_ms or m.ms, m.p80_ms or m.ms, self._row_of[m.candidate])
        )

    def close_to_best(
        self, canonical: Callable[[Candidate], tuple[Any, ...]], *, oracle: bool
    ) -> list[Candidate]:
        """Return the candidates worth timing again side by side, in canonical order.

        They are the fastest, then those that may tie, and the base's fastest if it is as close: variants have
        to beat it. With `oracle`, where everything was measured, all close ones, fastest first.
        """
        fast = self.fastest()
        margin = ORACLE_FINALIST_MARGIN if oracle else FINALIST_MARGIN
        within = [m for m in fast if m.ms <= fast[0].ms * (1 + margin) + LOOK_ERROR_MS]
        if oracle:
            return [m.candidate for m in within]
        alike = [m for m in within[1:] if m.ms <= fast[0].ms * (1 + PROBABLE_TIE) + LOOK_ERROR_MS]
        within[1 : 1 + len(alike)] = sorted(alike, key=lambda m: canonical(m.candidate))
        close = within[: max(MAX_FINALISTS, min(1 + len(alike), 3 * MAX_FINALISTS))]
        if not any(m.candidate.is_base_variant for m in close):
            close[-1:] = [m for m in within if m.candidate.is_base_variant][:1] or close[-1:]
        return sorted((m.candidate for m in close), key=canonical)


def tied(fast: Sequence[Measurement], tolerance: float) -> list[Measurement]:
    """Measurements, fastest first, that are behind the first by a trifle: no clock tells which one is the best.

    A trifle is no more than `NEGLIGIBLE_GAIN`, `LOOK_ERROR_MS` or the noise of both medians, and never more than the
    tolerance.
    """
    best = fast[0]
    noise = [2.0 * math.hypot(best.error_ms, m.error_ms) for m in fast]
    trifles = [min(max(NEGLIGIBLE_GAIN * best.ms, LOOK_ERROR_MS, n), tolerance * best.ms) for n in noise]
    return [m for m, trifle in zip(fast, trifles, strict=True) if m.ms - best.ms <= trifle]
