"""The measurement table: JSON Lines on disk (`.jsonl`, `.jsonl.gz`), `Table`s in memory."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records.candidate import Candidate
from forecast_autotune.records.json_fields import decode_json
from forecast_autotune.records.measurement import Measurement
from forecast_autotune.records.problem import Problem


@dataclass
class Table:
    """One problem and what was measured of it, at most one measurement per candidate that counts."""

    problem: Problem
    measurements: list[Measurement] = field(default_factory=list)

    def by_candidate(self) -> dict[Candidate, Measurement]:
        """The measurement that counts per candidate: the last one that is a label."""
        return latest_labels(self.measurements)

    def grids(self) -> dict[Candidate, tuple[int, ...]]:
        """The launch grid per candidate, where it was recorded."""
        return {c: m.grid for c, m in self.by_candidate().items() if m.grid is not None}

    def log2_ms(self) -> list[float]:
        """log2(milliseconds) in the order of `by_candidate`; NaN for failures."""
        return [math.log2(m.ms) if m.ok else math.nan for m in self.by_candidate().values()]


def latest_labels(measurements: Iterable[Measurement]) -> dict[Candidate, Measurement]:
    """The last label per candidate, in order of first appearance; infrastructure faults never count."""
    kept: dict[Candidate, Measurement] = {}
    for m in measurements:
        if m.outcome.is_label:
            kept[m.candidate] = m
    return kept


@contextlib.contextmanager
def _text(path: Path) -> Iterator[Iterable[str]]:
    """The lines of a file, unpacked if need be; standard input stays open."""
    import gzip

    with contextlib.ExitStack() as stack:
        if str(path) != "-":
            raw: IO[bytes] = stack.enter_context(path.open("rb"))
        elif sys.stdin is None:
            raise RecordError("-: standard input is closed: give a file, or pipe a table in")
        elif hasattr(sys.stdin, "buffer"):
            raw = sys.stdin.buffer
        else:  # replaced by something that is text already
            yield sys.stdin
            return
        if not isinstance(raw, io.BufferedReader):
            raw = io.BufferedReader(raw)  # type: ignore[type-var]
        # Looked at, not read: a pipe cannot go back.
        packed = raw.peek(2)[:2] == b"\x1f\x8b"
        # With the byte-order mark that Windows tools put first, or without.
        text = io.TextIOWrapper(gzip.GzipFile(fileobj=raw) if packed else raw, encoding="utf-8-sig")
        try:
            yield text
        finally:
            text.detach()


def _parsed(text: str) -> Any:
    data = decode_json(text)
    if "\\u" in text:
        # Half of a surrogate pair is fine in JSON's ASCII form, and can be written nowhere later.
        json.dumps(data, ensure_ascii=False).encode()
    return data


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of a table file, gzip-compressed or not; `-` reads standard input.

    Raises `RecordError` with file and line for text that is not one JSON object per line.
    """
    # Here, since whoever reads a stored decision loads this module, and no packed file.
    import gzip
    import zlib

    with _text(path) as stream:
        try:
            for number, text in enumerate(stream, 1):
                if not text.strip():
                    continue
                try:
                    data = _parsed(text)
                except RecursionError as error:
                    raise RecordError(f"{path}:{number}: not JSON (nested too deeply)") from error
                except ValueError as error:
                    raise RecordError(f"{path}:{number}: not JSON ({error})") from error
                if not isinstance(data, dict):
                    raise RecordError(f"{path}:{number}: expected an object, got {text[:60]!r}")
                yield number, data
        except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise RecordError(f"{path}: unreadable or cut off: {error}") from error


def table_of_problem(tables: dict[str, Table], problem: Problem) -> Table:
    """The table of a problem among `tables`, by id, added if need be; its IR joins what is known of it.

    Raises `RecordError` if its id names another kernel or device there: the measurements of the two
    would be mixed.
    """
    table = tables.setdefault(problem.id, Table(problem))
    first = table.problem
    if (first.kernel.name, first.device.slug) != (problem.kernel.name, problem.device.slug):
        raise RecordError(
            f"id {problem.id!r} names {first.kernel.name} on {first.device.name} already, not "
            f"{problem.kernel.name} on {problem.device.name}: give every problem its own id"
        )
    if problem is not first and (problem.ttir or problem.extra):
        table.problem = first.joined(problem)
    return table


def read_tables(path: Path, other: Callable[[dict[str, Any]], None] | None = None) -> list[Table]:
    """Read every problem of a table file, in order of appearance.

    Lines of other types are handed to `other`, or ignored, so that a newer file can carry more. Raises
    `RecordError` for malformed lines, for measurements whose problem line has not come before them, and for
    an id that names two problems.
    """
    tables: dict[str, Table] = {}
    for number, data in read_lines(path):
        try:
            if data.get("type") == "problem":
                problem = Problem.from_json(data)
                table_of_problem(tables, problem)
            elif data.get("type") == "measurement":
                measurement = Measurement.from_json(data)
                if measurement.problem not in tables:
                    raise RecordError(f"no problem line for {measurement.problem!r} before this one")
                tables[measurement.problem].measurements.append(measurement)
            elif other is not None:
                other(data)
        except RecordError as error:
            raise RecordError(f"{path}:{number}: {error}") from error
    return list(tables.values())


def dump_line(data: Mapping[str, Any]) -> str:
    """One JSON object on one line, without NaN or infinity."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n"


def table_lines(tables: Iterable[Table], more: Iterable[Mapping[str, Any]] = ()) -> Iterator[str]:
    """The lines of a table file, and then `more` lines of other types."""
    for table in tables:
        yield dump_line(table.problem.to_json())
        for measurement in table.measurements:
            yield dump_line(measurement.to_json())
    yield from map(dump_line, more)


def write_tables(path: Path, tables: Iterable[Table], more: Iterable[Mapping[str, Any]] = ()) -> int:
    """Write a table file (gzip when the name ends in `.gz`; `-` is standard output), atomically.

    `more` are lines of other types, which readers of tables ignore. Returns the number of measurements
    written.
    """
    import gzip

    tables, more = list(tables), list(more)
    count = sum(len(t.measurements) for t in tables)
    if str(path) == "-":
        sys.stdout.writelines(table_lines(tables, more))
        return count
    part = path.with_name(f".{path.name}.part")
    try:
        if path.suffix == ".gz":
            # mtime=0: the same table gives the same bytes, so a repository sees no false change.
            with part.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
                packed.writelines(line.encode() for line in table_lines(tables, more))
        else:
            with part.open("w", encoding="utf-8") as stream:
                stream.writelines(table_lines(tables, more))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count
