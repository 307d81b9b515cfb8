"""One kernel on one device class: its logs, its decisions, unwritten rows, and markers of running launches.

A small file marks a candidate's first launch. If the process dies there (a kernel that crashes it, or hangs until
somebody kills it), the file stays behind; the next process that tunes the problem turns it into a failed measurement
and does not try that candidate again.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forecast_autotune.errors import RecordError, StoreError
from forecast_autotune.file_access import open_regular, space_remedy
from forecast_autotune.records import Candidate, Decision, Measurement, Outcome, Problem, RiskVerdict
from forecast_autotune.records.table import Table
from forecast_autotune.store.files import (
    StoreNotes,
    acquire_lock,
    append,
    encode,
    flush_to_disk,
    host_name,
    kernel_of,
    list_files,
    make_kernel_folder,
    problem_file,
    read_record,
    release_lock,
    replace_record,
    write_all,
    write_atomically,
)
from forecast_autotune.store.importing import HeldNames, NewRow, imported_name
from forecast_autotune.store.log import LogFile, own_log

if TYPE_CHECKING:
    from forecast_autotune.records import Problem

_PROCESS_ID = re.compile("[0-9]{1,9}")


@contextlib.contextmanager
def launch_marker(directory: Path | None, problem: Problem, candidate: Candidate) -> Iterator[None]:
    """Leave a note while the block runs. Any ordinary way out, an exception too, removes it."""
    path = None if directory is None else directory / _marker_name(problem, os.getpid())
    text = encode(candidate.to_json())
    if path is not None:
        try:
            make_kernel_folder(path.parent)
            with open_regular(path, "wb") as stream:
                write_all(stream, text)
        except OSError:
            path = None  # a read-only store cannot watch; the launch goes on
    try:
        yield
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()


def recover_crashes(directory: Path | None, problem: Problem, notes: StoreNotes) -> list[Measurement]:
    """Turn the markers of this host's dead processes into failed measurements, and remove them."""
    measurements: list[Measurement] = []
    if directory is None or not directory.is_dir():
        return measurements
    for path in directory.glob(_marker_name(problem, None)):
        pid = path.stem.rpartition("-")[2]
        # A note with our own number is from before a restart: we are not launching anything now.
        if not _PROCESS_ID.fullmatch(pid) or (int(pid) != os.getpid() and _is_alive(int(pid))):
            continue
        candidate = read_record(path, _sound_candidate, "no candidate", notes)
        if candidate is not None:
            measurements.append(
                Measurement(
                    problem.id,
                    candidate,
                    Outcome.RUNTIME_ERROR,
                    protocol="watch",
                    at=datetime.now(UTC).isoformat(timespec="seconds"),
                    extra={"message": "the process died or was killed during the first launch"},
                )
            )
        with contextlib.suppress(OSError):
            path.unlink()
    return measurements


def _sound_candidate(data: Any) -> Candidate:
    candidate = Candidate.from_json(data)
    hash(candidate)
    return candidate


def forget(directory: Path) -> None:
    """Remove all notes of a kernel's directory, those of running processes too."""
    for path in directory.glob("running-*.json"):
        with contextlib.suppress(OSError):
            path.unlink()


def _marker_name(problem: Problem, pid: int | None) -> str:
    return f"running-{problem_file(problem.id)}-{host_name()}-{'*' if pid is None else pid}.json"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # somebody else's process: it exists
    return True


_LOCK_TIMEOUT_S = 10.0
"""Longest wait for another process's write, which takes well under a millisecond."""


@dataclass(frozen=True)
class StoredCounts:
    """Counts of the contents of one or more kernels: all that `clear` removes."""

    measurements: int = 0
    decisions: int = 0
    unread_lines: int = 0
    """Lines of logs that are no records to this release: damaged ones, and those of a newer release."""
    unread_decisions: int = 0
    """Files of decisions, likewise."""

    def __add__(self, other: StoredCounts) -> StoredCounts:
        """The sum of both."""
        return StoredCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


class KernelDirectory:
    """The store's view of one `<device>/<kernel>` directory. `path` None: memory only."""

    def __init__(self, path: Path | None, notes: StoreNotes) -> None:
        self.path = path
        self._notes = notes
        self._logs: dict[str, LogFile] = {}
        self._unwritten: list[NewRow] = []
        """Entries that are not on disk: all in memory-only mode, else those that could not be written."""
        self._decisions: dict[str, Decision] = {}
        """Decisions that are not on disk."""
        self._facts: dict[str, Mapping[str, Any]] = {}
        """Facts that are not on disk."""
        self._unsynced: set[Path] = set()
        self._patience_s = _LOCK_TIMEOUT_S
        self._mutexes: dict[str, threading.Lock] = {}

    def forget(self) -> None:
        """Drop data that can be read again; a forked child calls this, as the fork may have interrupted a change."""
        self._logs = {}
        self._mutexes = {}

    # --- reading ---

    def refresh(self) -> None:
        """Read what any process on any host appended since the last time."""
        if self.path is None:
            return
        try:
            names = {
                p.name for p in self.path.iterdir() if p.name.startswith("log-") and p.suffix == ".jsonl"
            }
        except (FileNotFoundError, NotADirectoryError):
            names = set()
        except OSError as error:
            message = f"{self.path}: cannot be listed, going on with what is known: {error}"
            self._notes.add(message, topic=str(self.path))
            return
        self._logs = {name: log for name, log in self._logs.items() if name in names}
        for name in sorted(names):
            self._log(name).refresh()

    def _log(self, name: str) -> LogFile:
        if name not in self._logs:
            assert self.path is not None
            self._logs[name] = LogFile(self.path / name, self._notes, self._files)
        return self._logs[name]

    def _own_log(self) -> LogFile:
        assert self.path is not None
        return self._log(own_log(self.path).name)

    def _files(self, problem: Problem) -> bool:
        """Whether a problem's records belong here. A damaged or copied one would hide another problem's."""
        return self.path is None or kernel_of(problem) == (self.path.parent.name, self.path.name)

    def measurements(self, problem_id: str) -> list[Measurement]:
        """The measurements known of one problem after the last refresh, oldest first.

        Hosts are merged by time; a measurement without a time counts as older than all others.
        """
        results = [m for log in self._logs.values() for m in log.measurements.get(problem_id, ())]
        on_disk = set(results) if self._unwritten and results else set()
        for entry in self._unwritten:
            m = entry.measurement
            # A write that failed late (at close, on a network) may have arrived all the same.
            if m is not None and m.problem == problem_id and m not in on_disk:
                results.append(m)
        return sorted(results, key=lambda m: m.at)

    def problems(self) -> dict[str, Problem]:
        """Every problem known after the last refresh, by id, in order of first appearance."""
        problems: dict[str, Problem] = {}
        for log in self._logs.values():
            problems |= {name: problem for name, problem in log.problems.items() if name not in problems}
        for entry in self._unwritten:
            problems.setdefault(entry.problem.id, entry.problem)
        return problems

    def tables(self) -> Iterator[Table]:
        """Every problem with at least one measurement, after the last refresh."""
        for problem in self.problems().values():
            if measurements := self.measurements(problem.id):
                yield Table(problem, measurements)

    # --- writing ---

    def add(self, entries: list[NewRow], *, unique: bool = False) -> int:
        """Append entries in one write; returns how many were added.

        `unique` leaves out entries that the store has. Entries that cannot be written are kept in memory, reported, and
        written together with the next entry that can be.
        """
        if self.path is None:
            fresh = self._not_held(entries) if unique else entries
            self._unwritten += fresh
            return len(fresh)
        lock = None
        fresh = entries
        try:
            make_kernel_folder(self.path)
            own = self._own_log()
            try:
                lock = acquire_lock(own.lock_path, self._patience_s, 0.002)
            except TimeoutError:
                self._patience_s = 0.0
                self._notes.add(
                    f"{own.lock_path}: held for {_LOCK_TIMEOUT_S:.0f} s by another process, ignored"
                )
            if unique:
                self.refresh()
                fresh = self._not_held(entries)
            own.refresh(locked=lock is not None)
            if payload := self._lines_to_write(own, fresh):
                append(own.path, payload, exclusive=lock is not None)
                self._unsynced.add(own.path)
                own.refresh(locked=lock is not None)
            self._unwritten = []
        except OSError as error:
            fresh = self._not_held(entries) if unique else entries
            self._unwritten += fresh
            self._warn_unsaved(error)
        finally:
            release_lock(lock)
        return len(fresh)

    def add_new(self, rows: list[NewRow], held: HeldNames | None) -> int:
        """Append the rows of an import that are not held, as `add` does; returns how many were added."""
        lock = None
        try:
            if self.path is not None and held is not None:
                make_kernel_folder(self.path)
                log = own_log(self.path)
                with contextlib.suppress(TimeoutError):
                    lock = acquire_lock(LogFile.lock_of(log), self._patience_s, 0.002)
                if (later := own_log(self.path)) != log:  # another process filled it while this one waited
                    release_lock(lock)
                    lock, log = acquire_lock(LogFile.lock_of(later), self._patience_s, 0.002), later
                held.refresh()
                count = held.write(log, rows, exclusive=lock is not None)
                self._unsynced.add(log)
                return count
        except (OSError, TimeoutError):
            pass  # `add` keeps the rows in memory, and says so
        finally:
            release_lock(lock)
        return self.add([row for row in rows if row.name], unique=True)

    def _warn_unsaved(self, error: OSError) -> None:
        self._notes.add(
            f"the measurement store cannot write to {self.path} ({error}); results stay in memory "
            f"only: {space_remedy(error)}",
            topic="unsaved",
        )

    def _lines_to_write(self, own: LogFile, fresh: list[NewRow]) -> bytes:
        lines: list[bytes] = []
        ids = set(own.problems)
        late_writes = [e for e in self._unwritten if e.measurement in own.measurements.get(e.problem.id, ())]
        for entry in [*(e for e in self._unwritten if e not in late_writes), *fresh]:
            if entry.problem.id not in ids:
                ids.add(entry.problem.id)
                lines.append(encode(entry.problem.to_json()))
            lines.append(entry.line)
        return b"".join(lines)

    def _not_held(self, entries: list[NewRow]) -> list[NewRow]:
        """Entries whose measurement is not held yet."""
        names = {imported_name(m) for i in {e.problem.id for e in entries} for m in self.measurements(i)}
        new: list[NewRow] = []
        for entry in entries:
            if entry.measurement is not None and (key := imported_name(entry.measurement)) not in names:
                names.add(key)
                new.append(entry)
        return new

    def sync(self) -> None:
        """Make what was appended survive a power cut."""
        for path in self._unsynced:
            try:
                flush_to_disk(path)
            except OSError as error:
                self._notes.add(f"{path}: not flushed to disk: {error}")
        self._unsynced = set()

    # --- decisions ---

    def decision(self, problem_id: str) -> Decision | None:
        """The decision on file, or the one that could not be filed."""
        if problem_id in self._decisions or self.path is None:
            return self._decisions.get(problem_id)
        return self._read_decision(self.path / "decisions" / f"{problem_file(problem_id)}.json", problem_id)

    def _read_decision(
        self, path: Path, problem_id: str | None = None, *, holding: bytes = b""
    ) -> Decision | None:
        def sound(data: dict[str, Any]) -> Decision:
            decision = Decision.from_json(data)
            hash(decision.chosen)
            if problem_id not in (None, decision.problem) or path.stem != problem_file(decision.problem):
                raise ValueError(f"it is about problem {decision.problem!r}, not {problem_id or path.stem!r}")
            return decision

        return read_record(path, sound, "not a decision", self._notes, holding=holding)

    def _read_decisions(self, *, holding: bytes = b"") -> dict[str, Decision]:
        """The decisions that could not be filed, and those on file that hold these bytes, by problem."""
        results = dict(self._decisions)
        if self.path is not None:
            for path in list_files(self.path / "decisions", "[!.]*.json", self._notes):
                if (decision := self._read_decision(path, holding=holding)) is not None:
                    results.setdefault(decision.problem, decision)
        return results

    def put_decision(self, problem: Problem, decision: Decision) -> None:
        """File a decision, and its problem with it, so that it can be shown later."""
        payload = encode(decision.to_json())
        if self.path is None:
            self._decisions[problem.id] = decision
        else:
            try:
                make_kernel_folder(self.path)
                replace_record(self.path / "decisions" / f"{problem_file(problem.id)}.json", payload)
                self._decisions.pop(problem.id, None)
            except OSError as error:
                self._decisions[problem.id] = decision
                self._warn_unsaved(error)
        self.refresh()
        if problem.id not in self.problems():
            self.add([NewRow.of(problem, None)])

    def decisions(self) -> Iterator[tuple[Problem, Decision]]:
        """Every decision with its problem, after the last refresh."""
        problems = self.problems()
        for name, decision in sorted(self._read_decisions().items()):
            if name in problems:
                yield problems[name], decision
            else:
                self._notes.add(f"{self.path}: the decision on problem {name} has lost its problem line")

    # --- facts ---

    def facts(self, problem_id: str) -> Mapping[str, Any] | None:
        """The facts kept of a problem (`features.traced_texts`). A damaged file is noted and counts as none."""
        if problem_id in self._facts or self.path is None:
            return self._facts.get(problem_id)
        path = self.path / "facts" / f"{problem_file(problem_id)}.json"
        return read_record(path, _sound_facts, "no facts", self._notes)

    def put_facts(self, problem_id: str, facts: Mapping[str, Any]) -> None:
        """Replace the facts kept of a problem. Raises `RecordError` for values that JSON cannot hold."""
        payload = encode(facts)
        if self.path is None:
            self._facts[problem_id] = facts
            return
        try:
            make_kernel_folder(self.path)
            write_atomically(self.path / "facts" / f"{problem_file(problem_id)}.json", payload)
        except OSError as error:
            # Only a refit misses them, and the next decision writes them again.
            self._warn_unsaved(error)

    def verdicts(self) -> list[RiskVerdict]:
        """All verdicts of the decisions on file; decisions without any are not even parsed."""
        result = self._read_decisions(holding=b'"share":')
        return [v for _, decision in sorted(result.items()) for v in decision.verdicts]

    def counts(self) -> StoredCounts:
        """The counts after the last refresh."""
        decisions = self._read_decisions()
        stems = {problem_file(name) for name in decisions}
        files = [] if self.path is None else list_files(self.path / "decisions", "[!.]*.json", self._notes)
        return StoredCounts(
            sum(len(self.measurements(name)) for name in self._known_ids()),
            len(decisions),
            sum(log.unread_lines for log in self._logs.values()),
            sum(path.stem not in stems for path in files),
        )

    # --- locks, removal ---

    @contextlib.contextmanager
    def tuning_lock(self, problem_id: str, timeout_s: float) -> Iterator[bool]:
        """Hold the right to tune one problem. Yields False where it could not be had."""
        if self.path is None:
            mutex = self._mutexes.setdefault(problem_id, threading.Lock())
            is_held = mutex.acquire(timeout=max(timeout_s, 0.0))
            try:
                yield is_held
            finally:
                if is_held:
                    mutex.release()
            return
        lock = None
        # Busy and impossible are both a plain False here.
        with contextlib.suppress(OSError):
            make_kernel_folder(self.path)
            lock = acquire_lock(self.path / f"tuning-{problem_file(problem_id)}.lock", timeout_s, 0.02)
        try:
            yield lock is not None
        finally:
            release_lock(lock)

    def clear(self) -> int:
        """Empty all logs and remove all decisions and facts.

        Lock files stay, as removing one would split its waiters, and so does a line per log that tells
        other processes to forget what they have read.

        Returns the number of measurements removed. Raises `StoreError` when a file cannot be removed.
        """
        self.refresh()
        count = sum(len(self.measurements(name)) for name in self._known_ids())
        self._unwritten, self._decisions, self._facts = [], {}, {}
        if self.path is None:
            return count
        try:
            for log in list(self._logs.values()):
                lock = acquire_lock(log.lock_path, _LOCK_TIMEOUT_S, 0.002)
                try:
                    log.clear()
                finally:
                    release_lock(lock)
            for folder in (self.path / "decisions", self.path / "facts"):
                for path in list_files(folder, "*", self._notes):
                    path.unlink(missing_ok=True)
            forget(self.path)
        except OSError as error:
            raise StoreError(
                f"cannot clear {self.path}: {error}; stop the processes that use it, or remove it by hand"
            ) from error
        self._logs = {}
        return count

    def _known_ids(self) -> Iterable[str]:
        ids = {name for log in self._logs.values() for name in log.measurements}
        return ids | {entry.problem.id for entry in self._unwritten}


def _sound_facts(data: dict[str, Any]) -> dict[str, Any]:
    """Facts as `features.traced_texts` writes them; a unit's contents are checked where they are read."""
    units = data.get("units")
    if not isinstance(data.get("version"), str) or not isinstance(units, list):
        raise RecordError("facts have a version, a text, and units, a list")
    if not all(isinstance(unit, list) and len(unit) == 3 for unit in units):
        raise RecordError("each unit of facts is a list of an assignment, a grid and its facts")
    return data
