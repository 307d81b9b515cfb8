"""What the ranks of a job know together of one problem: a log that all append to and read in one order.

Entry i is the value of one key, written by compare-and-set where there was none: ranks that append at once get
neighbouring places, and nobody can change or skip an entry. As every rank applies the same entries in the same
order by the same rules, all agree on who measures what, and on the first valid decision, without ever waiting for
each other.

    {"by": ..., "claim": [candidate ids]}    the writer measures those that nobody has claimed and nobody measured
    {"by": ..., "release": [candidate ids]}  it does not, after all
    {"by": ..., "row": measurement}          what it measured; the first one of a candidate counts
    {"by": ..., "lost": name, "before": i}   what `name` claimed before entry i is free: it gave no sign of life
    {"by": ..., "decision": decision}        the first one counts
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.ranks.job import Job, beat_key
from forecast_autotune.ranks.job_store import JobStoreLostError
from forecast_autotune.records import Candidate, Decision, Measurement
from forecast_autotune.records.bounded_json import decode_bounded
from forecast_autotune.records.json_fields import MALFORMED
from forecast_autotune.tuning.task import TuningTask

FINALE = "finale"
"""Claimed like a candidate: timing the fastest again side by side, and proposing a decision."""
LONGEST_ENTRY = 65536
"""Characters; longer ones are not read. A row has about a thousand."""
_MOST_ENTRIES = 100_000
"""Entries read of one problem; no tuning needs more than a few per candidate."""


@dataclass(frozen=True)
class _Lease:
    holder: str
    entry: int
    since: float
    """When this process read of it, by its own clock."""


@dataclass
class _SignOfLife:
    value: str | None
    since: float


class Board:
    """One problem's log, as far as this process has read it. Without its store it knows and shares nothing more."""

    def __init__(self, job: Job, task: TuningTask, name: str) -> None:
        self.job = job
        self.problem, self.candidates = task.problem, task.candidates
        self.rows: dict[Candidate, Measurement] = {}
        """The first measurement that was posted of each candidate, in the log's order."""
        self.own: set[Candidate] = set()
        """Of these, the ones that this process posted."""
        self.decision: Decision | None = None
        self.decided_by: object = None
        """The rank whose decision it is."""
        self.decided_here = False
        """Whether it is this process's own."""
        self.works = False
        """Whether some candidate is known to run."""
        self.names: set[str] = {job.name}
        """Every process that has taken part, as far as not found dead."""
        self._log, self._next, self._written = f"log/{name}", 0, 0
        self._leases: dict[str, _Lease] = {}
        self._signs: dict[str, _SignOfLife] = {}
        self._looked = job.clock.now()
        self._ids: dict[str, Candidate] = {}

    # --- what is known ---

    @property
    def alone(self) -> bool:
        """Whether there is nobody to share with any more."""
        return bool(self.job.left)

    def claimed_here(self) -> list[Candidate]:
        """What this process has undertaken to measure and not measured."""
        return [self._ids[i] for i, lease in self._leases.items() if self._is_own(lease) and i != FINALE]

    def claimed_elsewhere(self) -> dict[Candidate, float]:
        """What others have undertaken to measure, with the seconds since this process heard of it."""
        now = self.job.clock.now()
        return {
            self._ids[i]: now - lease.since
            for i, lease in self._leases.items()
            if not self._is_own(lease) and i != FINALE
        }

    def holds_finale(self) -> bool:
        """Whether this process has undertaken to decide."""
        return (lease := self._leases.get(FINALE)) is not None and self._is_own(lease)

    def _is_own(self, lease: _Lease) -> bool:
        return lease.holder == self.job.name

    # --- reading and writing ---

    def read(self) -> int:
        """Read what others have written since the last time; returns how many entries there were."""
        first = self._next
        try:
            while self._next < _MOST_ENTRIES:
                text = self.job.store.get(self._key())
                if text is None:
                    break
                self._take(text)
        except Exception as error:
            self._leave(error)
        return self._next - first

    def claim(self, candidates: Sequence[Candidate], most: int) -> None:
        """Undertake to measure up to `most` of these, in this order, as far as nobody else does."""
        listed = self._by_id()
        names = [c.id for c in candidates]

        def entry() -> Mapping[str, Any] | None:
            free = [i for i in names if i not in self._leases and listed[i] not in self.rows]
            return {"claim": free[:most]} if free and self.decision is None else None

        self._append(entry)

    def claim_finale(self) -> None:
        """Undertake to decide, unless another rank does or has."""
        self._append(
            lambda: {"claim": [FINALE]} if FINALE not in self._leases and self.decision is None else None
        )

    def release(self, candidates: Iterable[Candidate]) -> None:
        """Leave these to others."""
        names = [c.id for c in candidates]

        def entry() -> Mapping[str, Any] | None:
            held = [i for i in names if (lease := self._leases.get(i)) is not None and self._is_own(lease)]
            return {"release": held} if held else None

        if not self.alone:
            self._append(entry)

    def post(self, m: Measurement) -> None:
        """Tell the others of a measurement."""
        self.own.add(m.candidate)
        row = {**m.to_json(), "rank": self.job.rank}
        if len(json.dumps(row)) > LONGEST_ENTRY // 2:
            row = replace(m, extra={"rank": self.job.rank}).to_json()
        self._append(lambda: {"row": row})

    def propose(self, decision: Decision) -> None:
        """Make this the job's decision, unless there is one; `decision` tells which it is."""
        shown = decision.to_json()
        self._append(lambda: {"decision": shown} if self.decision is None else None)
        if self.decision is None:  # without its store, or refused: what this process decided stands
            self.decision, self.decided_by, self.decided_here = decision, self.job.rank, True

    def find_dead(self) -> None:
        """Free what was claimed by processes that give no sign of life; asks the store rarely."""
        clock, limits = self.job.clock, self.job.limits
        holders = {lease.holder for lease in self._leases.values()} - {self.job.name}
        if not holders or self.alone or clock.now() - self._looked < limits.beat_s:
            return
        self._looked = clock.now()
        try:
            seen = {name: self.job.store.get(beat_key(name)) for name in sorted(holders)}
        except Exception as error:
            self._leave(error)
            return
        now = clock.now()
        signs = {name: self._signs.get(name) for name in seen}
        self._signs = {
            name: sign if sign is not None and sign.value == seen[name] else _SignOfLife(seen[name], now)
            for name, sign in signs.items()
        }
        for name, sign in self._signs.items():
            if now - sign.since >= limits.lease_s:
                self._declare_lost(name, self._next)

    def _declare_lost(self, name: str, before: int) -> None:
        def entry() -> Mapping[str, Any] | None:
            held = [lease for lease in self._leases.values() if lease.holder == name and lease.entry < before]
            return {"lost": name, "before": before} if held else None

        self._append(entry)

    def _key(self) -> str:
        return f"{self._log}/{self._next}"

    def _append(self, make: Callable[[], Mapping[str, Any] | None]) -> None:
        """Append what `make` returns after everything before it is read; nothing where that is None."""
        try:
            while not self.alone and (entry := make()) is not None:
                self._written += 1
                head = {"by": self.job.name, "rank": self.job.rank, "n": self._written}
                text = json.dumps({**head, **entry})
                stands = self.job.store.compare_set(self._key(), "", text)
                self._take(stands)
                if stands == text:
                    return
        except Exception as error:
            self._leave(error)

    def _leave(self, error: Exception) -> None:
        """Go on alone: whatever fails of sharing, a decision does not."""
        self.job.leave(str(error) if isinstance(error, JobStoreLostError) else repr(error))

    # --- applying entries ---

    def _take(self, text: str) -> None:
        place, self._next = self._next, self._next + 1
        rank: object = "?"
        try:
            if len(text) > LONGEST_ENTRY:
                raise RecordError(f"an entry has at most {LONGEST_ENTRY} characters, this has {len(text)}")
            entry = decode_bounded(text, repair=True)
            if not isinstance(entry, dict) or not isinstance(entry.get("by"), str):
                raise RecordError("an entry is an object that says who wrote it")
            rank = entry.get("rank", rank)
            self._apply(entry, entry["by"], place)
        except MALFORMED as error:
            self.job.complain(repr(rank)[:20], f"{type(error).__name__}: {error}")

    def _apply(self, entry: Mapping[str, Any], by: str, place: int) -> None:
        if "claim" in entry:
            self.names.add(by)
            now = self.job.clock.now()
            for i in self._known_ids(entry["claim"]):
                if i not in self._leases and (i == FINALE or self._ids[i] not in self.rows):
                    self._leases[i] = _Lease(by, place, now)
        elif "release" in entry:
            for i in self._known_ids(entry["release"]):
                if i in self._leases and self._leases[i].holder == by:
                    del self._leases[i]
        elif "row" in entry:
            m = self._checked_row(entry["row"])
            self.rows.setdefault(m.candidate, m)
            self.works = self.works or m.ok
            self._leases.pop(m.candidate.id, None)
        elif "lost" in entry:
            lost, before = entry["lost"], entry.get("before")
            if not isinstance(lost, str) or not isinstance(before, int):
                raise RecordError('"lost" needs a name and the place before which it claimed')
            self.names.discard(lost)
            self._leases = {
                i: lease for i, lease in self._leases.items() if lease.holder != lost or lease.entry >= before
            }
        elif "decision" in entry:
            decision = self._checked_decision(entry["decision"])
            if self.decision is None:
                self.decision, self.decided_by = decision, entry.get("rank", "?")
                self.decided_here = by == self.job.name

    def _by_id(self) -> Mapping[str, Candidate]:
        if not self._ids:
            self._ids = {c.id: c for c in self.candidates}
        return self._ids

    def _known_ids(self, listed: Any) -> list[str]:
        known = self._by_id()
        if not isinstance(listed, list) or not all(i == FINALE or i in known for i in listed):
            raise RecordError("claims and releases list ids of this problem's candidates")
        return listed

    def _checked_row(self, data: Any) -> Measurement:
        m = Measurement.from_json(data)
        if not m.outcome.is_label:
            raise RecordError(f"outcome {m.outcome} says nothing of a candidate")
        return replace(m, candidate=self._checked_place(m.problem, m.candidate))

    def _checked_decision(self, data: Any) -> Decision:
        decision = Decision.from_json(data)
        chosen = self._checked_place(decision.problem, decision.chosen)
        if (row := self.rows.get(chosen)) is not None and not row.ok:
            raise RecordError(f"it chooses {chosen}, which failed: {row.outcome}")
        return replace(decision, chosen=chosen)

    def _checked_place(self, problem: str, candidate: Candidate) -> Candidate:
        """The task's own record of a candidate that an entry is about."""
        if problem != self.problem.id:
            raise RecordError(f"it is about problem {problem!r:.60}, not {self.problem.id!r}")
        if candidate.id not in self._by_id():
            raise RecordError(f"{candidate!s:.120} is no candidate of problem {self.problem.id!r}")
        return self._by_id()[candidate.id]
