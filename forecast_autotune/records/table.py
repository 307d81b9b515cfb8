"""The measurement table: JSON Lines on disk (`.jsonl`, `.jsonl.gz`, `.jsonl.xz`), `Table`s in memory."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.file_access import open_named_output
from forecast_autotune.records.bounded_json import decode_bounded, without_halves
from forecast_autotune.records.candidate import Candidate, Measurement, Outcome
from forecast_autotune.records.named_lines import (
    MAX_LINES,
    Refuse,
    bounded_refusals,
    numbered_lines,
    refuse_row,
)
from forecast_autotune.records.problem import Problem


@dataclass
class Table:
    """One problem and its measurements, at most one per candidate that counts."""

    problem: Problem
    measurements: list[Measurement] = field(default_factory=list)

    def by_candidate(self) -> dict[Candidate, Measurement]:
        """The measurement that counts per candidate: the last one that is a label."""
        return latest_labels(self.measurements)

    def with_extra(self, name: str, value: Mapping[str, Any] | None) -> Table:
        """The table with a field in its problem's record, which survives exports; None changes nothing."""
        if value is None:
            return self
        problem = replace(self.problem, extra={**self.problem.extra, name: dict(value)})
        return replace(self, problem=problem)

    def grids(self) -> dict[Candidate, tuple[int, ...]]:
        """The launch grid per candidate, where it was recorded."""
        return {c: m.grid for c, m in self.by_candidate().items() if m.grid is not None}

    def log2_ms(self) -> list[float]:
        """log2(milliseconds) in the order of `by_candidate`; NaN for failures."""
        return [math.log2(m.ms) if m.ok else math.nan for m in self.by_candidate().values()]


def comparable(measurements: Iterable[Measurement]) -> list[Measurement]:
    """The measurements without our own clock's times at another cache state than that of its latest time."""
    rows = list(measurements)
    state = next((m.cache_state for m in reversed(rows) if m.cache_state), "")
    return [m for m in rows if m.cache_state in ("", state)]


def latest_labels(measurements: Iterable[Measurement]) -> dict[Candidate, Measurement]:
    """The last label per candidate among the `comparable` measurements, in order of first appearance.

    Infrastructure faults never count.
    """
    labels: dict[Candidate, Measurement] = {}
    for m in comparable(measurements):
        last = labels.get(m.candidate)
        # Within one second, `incorrect` counts as the later row, whatever their order.
        is_overruled = last is not None and last.outcome is Outcome.INCORRECT and last.at == m.at
        if m.outcome.is_label and not is_overruled:
            labels[m.candidate] = m
    return labels


def read_lines(
    path: Path, refuse: Refuse | None = None, *, streamed: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of a table file, compressed or not; `-` reads standard input.

    A line that is not one JSON object within the bounds of `decode_bounded` is a `RecordError` with file and
    line: it is raised or, with `refuse`, handed to that while the other lines are read. Raises `RecordError`
    for a file beyond the bounds of `numbered_lines`.
    """
    for number, raw in numbered_lines(path, refuse, streamed=streamed):
        if not raw.strip():
            continue
        try:
            data = decode_bounded(raw.decode("utf-8"))
            if not isinstance(data, dict):
                raise RecordError(f"expected an object, got {data!r:.60}")
        except ValueError as error:
            refuse_row(RecordError(f"{path}:{number}: not JSON ({error})"), refuse)
        else:
            yield number, data


def table_of_problem(tables: dict[str, Table], problem: Problem) -> Table:
    """The table of a problem among `tables`, by id, added if need be; the problem's IR joins the table's.

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


def read_tables(
    path: Path, other: Callable[[dict[str, Any]], None] | None = None, refuse: Refuse | None = None
) -> list[Table]:
    """Read every problem of a table file, in order of appearance; see `read_rows`."""
    tables: dict[str, Table] = {}
    for table, measurement in read_rows(path, tables, other, refuse):
        table.measurements += [] if measurement is None else [measurement]
    return list(tables.values())


def read_rows(
    path: Path,
    tables: dict[str, Table],
    other: Callable[[dict[str, Any]], None] | None = None,
    refuse: Refuse | None = None,
    *,
    streamed: bool = False,
) -> Iterator[tuple[Table, Measurement | None]]:
    """Each measurement of a table file with the table of its problem, which joins `tables`; None for a problem's line.

    Lines of other types are handed to `other`, or ignored, so that a newer file can carry more. A malformed
    line, a measurement whose problem line has not come before it and an id that names two problems are a
    `RecordError` with file and line: it is raised or, with `refuse`, handed to that, and the other lines count.
    """
    refuse = bounded_refusals(path, refuse)
    other_count = 0
    for number, data in read_lines(path, refuse, streamed=streamed):
        try:
            if data.get("type") == "problem":
                yield table_of_problem(tables, Problem.from_json(data)), None
            elif data.get("type") == "measurement":
                measurement = Measurement.from_json(data)
                if measurement.problem not in tables:
                    raise RecordError(f"no problem line for {measurement.problem!r:.40} before this one")
                yield tables[measurement.problem], measurement
            else:
                other_count += 1
                if other is not None:
                    other(data)
        except RecordError as error:
            refuse_row(RecordError(f"{path}:{number}: {error}"), refuse)
        if other_count > MAX_LINES:
            raise RecordError(f"{path}: more than {MAX_LINES} lines are neither problems nor measurements")


def dump_line(data: Mapping[str, Any]) -> str:
    """One JSON object on one line, without NaN or infinity; half of a surrogate pair becomes U+FFFD."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n"
    return without_halves(text)


def table_lines(tables: Iterable[Table], more: Iterable[Mapping[str, Any]] = ()) -> Iterator[str]:
    """The lines of a table file, and then `more` lines of other types."""
    for table in tables:
        yield dump_line(table.problem.to_json())
        for measurement in table.measurements:
            yield dump_line(measurement.to_json())
    yield from map(dump_line, more)


def write_tables(path: Path, tables: Iterable[Table], more: Iterable[Mapping[str, Any]] = ()) -> int:
    """Write a table file (packed by the name's end, `.gz` or `.xz`; `-` is standard output), atomically.

    A file at `path` keeps its kind: a device or a pipe is written to, a symbolic link is followed. `more` are
    lines of other types, which readers of tables ignore. Returns the number of measurements written. Raises
    `OSError` where nothing can be written.
    """
    import gzip

    tables, more = list(tables), list(more)
    count = sum(len(t.measurements) for t in tables)
    if str(path) == "-":
        sys.stdout.writelines(table_lines(tables, more))
        return count
    lines = (line.encode() for line in table_lines(tables, more))
    with open_named_output(path) as stream:
        if path.suffix == ".gz":
            # mtime=0: the same table gives the same bytes, so a repository sees no false change.
            with gzip.GzipFile("", "wb", 9, stream, mtime=0) as writer:
                writer.writelines(lines)
        elif path.suffix == ".xz":
            import lzma

            with lzma.LZMAFile(stream, "wb", preset=9 | lzma.PRESET_EXTREME) as writer:
                writer.writelines(lines)
        else:
            stream.writelines(lines)
    return count
