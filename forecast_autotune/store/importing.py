"""Rows of other hands on their way into a store: streamed, each of them once, whatever the file was called."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from forecast_autotune.errors import RecordError
from forecast_autotune.file_access import open_regular
from forecast_autotune.records import Measurement, Problem
from forecast_autotune.records.json_fields import MALFORMED, digest
from forecast_autotune.store.files import KernelName, append, decode, encode, kernel_of

_ROWS, _BYTES = 8192, 4 << 20
"""A batch of rows, which is written at once, has at most as many, or is larger by one row."""
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
        dated = b"" if protocol in _UNDATED else at.partition(b'"')[0]
        name = line[begin:end] + dated
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


@dataclass(slots=True)
class NewRow:
    """A row that the import has not met before; `line` and `name` are empty where only its problem is given."""

    problem: Problem
    measurement: Measurement | None
    line: bytes = b""
    name: int = 0


class HeldNames:
    """The names of the rows in a kernel's logs, kept current by reading the bytes that were appended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._forget()

    def _forget(self) -> None:
        self.names: set[int] = set()
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
            rest = b""
            while chunk := stream.read(_BYTES):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if b'"type":"problem"' in line and (found := _problem_id(line)):
                        problems.setdefault(found, None)
                    elif name := line_name(line):
                        self.names.add(name)
                end += sum(map(len, lines)) + len(lines)
        self._ends[path] = end, edges_of(path, end)

    def write(self, log: Path, rows: list[NewRow], *, exclusive: bool) -> int:
        """Append those rows that are not held, after `refresh`; returns how many. Raises `OSError`."""
        known, lines, count = self.problems.setdefault(log, {}), [], 0
        for row in rows:
            if row.name in self.names:
                continue
            held = known.get(row.problem.id)
            if (
                row.problem.id not in known
                if row.name
                else held is not None and _is_fuller(row.problem, held)
            ):
                lines.append(encode(row.problem.to_json()))
                known[row.problem.id] = row.problem
            if row.name:
                self.names.add(row.name)
                lines.append(row.line)
                count += 1
        if lines:
            append(log, b"".join(lines), exclusive=exclusive)
            if exclusive:  # nobody else wrote since `refresh`
                end = log.stat().st_size
                self._ends[log] = end, edges_of(log, end)
        return count


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


def _is_fuller(problem: Problem, held: Problem) -> bool:
    return problem is not held and (problem.ttir, problem.extra) != (held.ttir, held.extra)


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
    ) -> None:
        self._directory_of, self._take_advice = directory_of, take_advice
        self.count = Imported()
        self._seen: set[int] = set()
        self._held: dict[KernelName, HeldNames] = {}

    def add(self, rows: Iterable[tuple[Problem, Measurement | None]]) -> int:
        """Add the rows that are not held yet; those before an error of `rows` are taken. Returns how many there were.

        Raises `RecordError` for a measurement of another problem, or with values that JSON cannot hold.
        """
        batch: dict[KernelName, list[NewRow]] = {}
        held, size, last, place, count = 0, 0, None, ("", ""), 0
        try:
            for count, (problem, measurement) in enumerate(rows, 1):  # noqa: B007 - returned
                if problem is not last:
                    last, place = problem, kernel_of(problem)
                    if problem.id not in self.count.problems:
                        self.count.problems.add(problem.id)
                        self._take_advice(problem)
                row = NewRow(problem, measurement)
                if measurement is not None:
                    if measurement.problem != problem.id:
                        raise RecordError(
                            f"a measurement is filed under its own problem: it is about {measurement.problem!r}, not "
                            f"{problem.id!r}; pass the problem it was measured for"
                        )
                    row.line = encode(measurement.to_json())
                    row.name = line_name(row.line)
                    self.count.rows += 1
                    if row.name in self._seen:
                        continue
                    self._seen.add(row.name)
                    self.count.distinct += 1
                batch.setdefault(place, []).append(row)
                held, size = held + 1, size + len(row.line)
                if held >= _ROWS or size >= _BYTES:
                    self._write(batch)
                    batch, held, size = {}, 0, 0
        finally:
            self._write(batch)
        return count

    def _write(self, batch: Mapping[KernelName, list[NewRow]]) -> None:
        for place, rows in batch.items():
            directory = self._directory_of(*place)
            if place not in self._held and directory.path is not None:
                self._held[place] = HeldNames(directory.path)
            self.count.added += directory.add_new(rows, self._held.get(place))
