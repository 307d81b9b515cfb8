"""Rows from files on their way into a store: streamed, each of them once, whatever the file's name.

A file whose every row a store took is known by its contents from then on, as long as the logs that hold the rows are
what they were: to import it again costs reading it once.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from forecast_autotune.errors import RecordError
from forecast_autotune.file_access import open_regular, read_regular
from forecast_autotune.records import SCHEMA, Measurement, Outcome, Problem
from forecast_autotune.records.json_fields import MALFORMED, digest
from forecast_autotune.records.named_lines import MAX_STREAM_BYTES
from forecast_autotune.store.files import KernelName, append, decode, encode, kernel_of, write_atomically
from forecast_autotune.version import __version__

_ROWS, _BYTES = 8192, 4 << 20
"""A batch of rows, which is written at once, has at most as many, or is larger by one row."""
_LEDGER = "imports.jsonl"
_LEDGER_FILE_BYTES = 1 << 20
"""A smaller file is read again as fast as it is looked up."""
_LEDGER_ENTRIES, _LEDGER_LOGS = 256, 64
_EDGE = 256
"""Bytes at either end of the part of a log that a file's rows are in, by which it is known again."""

UNDATED = ("triton-cache", "inductor-cache", "inductor-metrics")
"""Protocols whose rows had the time of their file once, which a copy has not."""


_UNDATED = frozenset(map(str.encode, UNDATED))


def imported_name(m: Measurement) -> tuple[object, ...]:
    """The values by which an import takes two measurements for one."""
    return m.problem, m.candidate.id, m.outcome, "" if m.protocol in UNDATED else m.at, m.median_ms


def line_name(line: bytes) -> int:
    """64 bits that stand for the `imported_name` of a measurement's line; 0 for a line that is no measurement.

    The values are neighbours in a line that this release wrote, and taken as they are; any other is read first.
    """
    begin, end = line.find(b'"schema":1,"problem":"'), line.find(b',"p20_ms":')
    median = line[line.rfind(b'"median_ms":', begin, end) + 12 : end]
    stamp = line.rfind(b',"protocol":"', end)
    if (
        0 <= begin < end < stamp
        and (median == b"null" or b"." in median)
        and line.find(b'"p20_ms":', end + 2) < 0  # a parameter of this name would stand before it
    ):
        protocol, _, at = line[stamp + 13 :].partition(b'","at":"')
        date = b"" if protocol in _UNDATED else at.partition(b'"')[0]
        name = line[begin:end] + date
    else:
        try:
            data = decode(line)
            if data.get("type") != "measurement":
                return 0
            measurement = Measurement.from_json(data)
        except MALFORMED:
            return 0
        again = encode(measurement.to_json())
        name = digest(*imported_name(measurement)).encode() if again == line else b""
        if not name:
            return line_name(again)
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") or 1


def line_of(m: Measurement) -> bytes:
    """The line of `m.to_json()`, in half the time where the measurement has no fields that few have."""
    config = m.candidate.config
    if m.extra or m.grid is not None or config.ir_override is not None or m.outcome is not Outcome.OK:
        return encode(m.to_json())
    launch = {"num_warps": config.num_warps, "num_stages": config.num_stages, "num_ctas": config.num_ctas}
    return encode(
        {
            "type": "measurement",
            "schema": SCHEMA,
            "problem": m.problem,
            "variant": m.candidate.variant,
            "config": {"kwargs": dict(config.kwargs), **launch, "maxnreg": config.maxnreg},
            "outcome": "ok",
            "median_ms": m.median_ms,
            "p20_ms": m.p20_ms,
            "p80_ms": m.p80_ms,
            "repeats": m.repeats,
            "compile_s": m.compile_s,
            "protocol": m.protocol,
            "at": m.at,
        }
    )


class NameSet:
    """A set of names of 64 bits that takes twelve bytes each; a set of Python's takes eighty."""

    def __init__(self) -> None:
        self._slots, self._count = array("Q", bytes(8 << 10)), 0

    def _slot(self, name: int) -> int:
        slots, mask = self._slots, len(self._slots) - 1
        at = name & mask
        while slots[at] not in (0, name):
            at = (at + 1) & mask
        return at

    def __contains__(self, name: int) -> bool:
        return self._slots[self._slot(name)] != 0

    def add(self, name: int) -> bool:
        """Add a name; whether it is new."""
        at = self._slot(name)
        if self._slots[at]:
            return False
        self._slots[at] = name
        self._count += 1
        if 3 * self._count > 2 * len(self._slots):
            old, self._slots = self._slots, array("Q", bytes(16 * len(self._slots)))
            for each in old:
                if each:
                    self._slots[self._slot(each)] = each
        return True


@dataclass(slots=True)
class NewRow:
    """A row to be stored; `line` is empty where only its problem is given, `name` unless it is an import's."""

    problem: Problem
    measurement: Measurement | None
    line: bytes = b""
    name: int = 0

    def __post_init__(self) -> None:
        """Raises `RecordError` for another problem's measurement."""
        if self.measurement is not None and self.measurement.problem != self.problem.id:
            raise RecordError(
                f"a measurement is filed under its own problem: it is about {self.measurement.problem!r}, not "
                f"{self.problem.id!r}; pass the problem it was measured for"
            )

    @classmethod
    def of(cls, problem: Problem, measurement: Measurement | None) -> NewRow:
        """Serialize. Raises `RecordError` for values that JSON cannot hold, and for another problem's measurement."""
        return cls(problem, measurement, b"" if measurement is None else encode(measurement.to_json()))


class HeldNames:
    """The names of the rows in a kernel's logs, kept current by reading the bytes that were appended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._forget()

    def _forget(self) -> None:
        self.names = NameSet()
        self.problems: dict[Path, dict[str, Problem | None]] = {}
        """By log: the problems that are described there, as far as this import wrote them."""
        self._ends: dict[Path, tuple[int, bytes]] = {}

    def refresh(self) -> None:
        """Read what any process appended; all of it again where a log was cleared. Raises `OSError`."""
        paths = sorted(self._folder.glob("log-*.jsonl"))
        for path in paths:
            if path in self._ends and not self._is_longer(path):
                self._forget()
                break
        for path in paths:
            self._read(path)

    def _is_longer(self, path: Path) -> bool:
        end, edges = self._ends[path]
        return edges_of(path, end) == edges

    def _read(self, path: Path) -> None:
        end, problems = self._ends.get(path, (0, b""))[0], self.problems.setdefault(path, {})
        if path.stat().st_size <= end:
            return
        with open_regular(path, "rb") as stream:
            stream.seek(end)
            tail = b""
            while chunk := stream.read(_BYTES):
                *lines, tail = (tail + chunk).split(b"\n")
                for line in lines:
                    if b'"type":"problem"' in line and (problem_id := _problem_id(line)):
                        problems.setdefault(problem_id, None)
                    elif name := line_name(line):
                        self.names.add(name)
                end += sum(map(len, lines)) + len(lines)
        self._ends[path] = end, edges_of(path, end)

    def write(self, log: Path, rows: list[NewRow], *, exclusive: bool) -> int:
        """Append the rows that the store does not have, after `refresh`; returns their number. Raises `OSError`."""
        problems, lines, count = self.problems.setdefault(log, {}), [], 0
        for row in rows:
            if row.name and not self.names.add(row.name):
                continue
            earlier = problems.get(row.problem.id)
            if (
                row.problem.id not in problems
                if row.name
                else earlier is not None and _is_fuller(row.problem, earlier)
            ):
                lines.append(encode(row.problem.to_json()))
                problems[row.problem.id] = row.problem
            if row.name:
                lines.append(row.line)
                count += 1
        if lines:
            append(log, b"".join(lines), exclusive=exclusive)
            if exclusive:  # nobody else wrote since `refresh`
                end = log.stat().st_size
                self._ends[log] = end, edges_of(log, end)
        return count

    def ends(self) -> list[list[Any]]:
        """Each log by its name, with the end of what was read, and its edges."""
        return [[path.name, end, edges.hex()] for path, (end, edges) in self._ends.items()]


def edges_of(path: Path, end: int) -> bytes:
    """A hash of both ends of a log up to a place in it; empty where it is shorter."""
    with open_regular(path, "rb") as stream:
        if os.fstat(stream.fileno()).st_size < end:
            return b""
        head = stream.read(min(_EDGE, end))
        stream.seek(max(0, end - _EDGE))
        return hashlib.blake2b(head + stream.read(min(_EDGE, end)), digest_size=16).digest()


def _problem_id(line: bytes) -> str:
    try:
        data = decode(line)
        return str(data["id"]) if data.get("type") == "problem" else ""
    except MALFORMED:
        return ""


def _is_fuller(problem: Problem, earlier: Problem) -> bool:
    return problem is not earlier and (problem.ttir, problem.extra) != (earlier.ttir, earlier.extra)


class KernelFolder(Protocol):
    """One kernel on one device class, as a store files it; `path` is None in memory."""

    path: Path | None

    def add_new(self, rows: list[NewRow], held: HeldNames | None) -> int:
        """Add the rows that are not held; returns how many."""
        ...


@dataclass
class Imported:
    """How much one import brought."""

    added: int = 0
    rows: int = 0
    distinct: int = 0
    problems: set[str] = field(default_factory=set)


class Importer:
    """Adds rows to a store in batches, a kernel at a time; each batch is safe from a kill once it is written."""

    def __init__(
        self,
        directory_of: Callable[[str, str], KernelFolder],
        take_advice: Callable[[Problem], None],
        root: Path | None,
    ) -> None:
        self._directory_of, self._take_advice, self._root = directory_of, take_advice, root
        self.count = Imported()
        self._names = NameSet()
        self._kernel_names: dict[KernelName, HeldNames] = {}

    def add(self, rows: Iterable[tuple[Problem, Measurement | None]]) -> int:
        """Add the rows that are not held yet; those before an error of `rows` are taken. Returns how many there were.

        Raises `RecordError` for a measurement of another problem, or with values that JSON cannot hold.
        """
        batch: dict[KernelName, list[NewRow]] = {}
        length, size, last, place, count = 0, 0, None, ("", ""), 0
        try:
            for count, (problem, measurement) in enumerate(rows, 1):  # noqa: B007 - returned
                if problem is not last:
                    last, place = problem, kernel_of(problem)
                    if problem.id not in self.count.problems:
                        self.count.problems.add(problem.id)
                        self._take_advice(problem)
                row = NewRow(problem, measurement)
                if measurement is not None:
                    row.line = line_of(measurement)
                    row.name = line_name(row.line)
                    self.count.rows += 1
                    if not self._names.add(row.name):
                        continue
                    self.count.distinct += 1
                batch.setdefault(place, []).append(row)
                length, size = length + 1, size + len(row.line)
                if length >= _ROWS or size >= _BYTES:
                    self._write(batch)
                    batch, length, size = {}, 0, 0
        finally:
            self._write(batch)
        return count

    def _write(self, batch: Mapping[KernelName, list[NewRow]]) -> None:
        for place, rows in batch.items():
            directory = self._directory_of(*place)
            if place not in self._kernel_names and directory.path is not None:
                self._kernel_names[place] = HeldNames(directory.path)
            self.count.added += directory.add_new(rows, self._kernel_names.get(place))

    # --- files that are known by their contents ---

    def name_of_contents(self, path: Path, how: str) -> str:
        """A name for a file's contents and how they are read; empty where the file is not worth one."""
        size = path.stat().st_size if self._root is not None and path.is_file() else 0
        if not _LEDGER_FILE_BYTES <= size <= MAX_STREAM_BYTES:
            return ""
        name = hashlib.blake2b(f"{how}|{__version__}|".encode(), digest_size=24)
        try:
            with open_regular(path, "rb") as stream:
                while chunk := stream.read(1 << 20):
                    name.update(chunk)
        except OSError:
            return ""
        return name.hexdigest()

    def is_known(self, name: str) -> bool:
        """Whether the store took a file of these contents whole, and holds its rows still; counts them if so."""
        entry = next((e for e in reversed(self._entries()) if e.get("file") == name), None) if name else None
        try:
            if entry is None or not all(self._holds(*log) for log in entry["logs"]):
                return False
            self.count.problems |= set(entry["problems"])
            self.count.distinct += entry["measurements"]
            self.count.rows += entry["measurements"]
        except (OSError, *MALFORMED):
            return False
        return True

    def _holds(self, device: str, kernel: str, log: str, end: int, edges: str) -> bool:
        folder = self._directory_of(device, kernel).path
        return folder is not None and edges_of(folder / log, end).hex() == edges

    def note(self, name: str, measurements: int) -> None:
        """Remember the contents of a file of so many distinct measurements, which was taken whole."""
        logs = [[*place, *log] for place, names in self._kernel_names.items() for log in names.ends()]
        problems = sorted(self.count.problems)
        if not name or self._root is None or max(len(logs), len(problems)) > _LEDGER_LOGS:
            return
        entry = {"file": name, "logs": logs, "problems": problems, "measurements": measurements}
        entries = [*self._entries(), entry]
        lines = [json.dumps(entry) + "\n" for entry in entries[-_LEDGER_ENTRIES:]]
        try:
            write_atomically(self._root / _LEDGER, "".join(lines).encode())
        except OSError:
            return  # it is read again then

    def _entries(self) -> list[dict[str, Any]]:
        assert self._root is not None
        try:
            return [decode(line) for line in read_regular(self._root / _LEDGER).splitlines()]
        except (OSError, *MALFORMED):
            return []
