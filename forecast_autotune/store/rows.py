"""A store's records as rows that are named by their content, and sets of such rows.

Equal records are one row wherever they were written, so that merging is the union of sets: the order and the
number of merges do not matter. The fullest of a problem's records is kept, and the latest of its decisions; ties
go by content. Both are maxima, so the same holds for them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Decision, Measurement, Problem
from forecast_autotune.records.candidate import IN_TURNS
from forecast_autotune.records.json_fields import MALFORMED
from forecast_autotune.store.files import KernelName, decode, kernel_of

PROBLEM, MEASUREMENT, DECISION = "problem", "measurement", "decision"
KINDS = (PROBLEM, MEASUREMENT, DECISION)
_IN_TURNS = f'{IN_TURNS}","'.encode()


def canonical_line(data: Mapping[str, Any]) -> bytes:
    """A JSON object as the one line that equal objects have: ASCII, names sorted, no spaces.

    Raises `RecordError` for values that JSON cannot hold.
    """
    try:
        text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"a row holds only JSON values: {error}") from error
    return text.encode("ascii") + b"\n"


@dataclass(frozen=True)
class Row:
    """One record; `line` is its canonical JSON and `digest` the SHA-256 of that, in hexadecimal digits."""

    kind: str
    """One of `KINDS`."""
    problem: str
    """Id of the problem that it belongs to."""
    at: str
    """UTC time, ISO 8601; empty where the record has none."""
    line: bytes = field(repr=False)
    digest: str
    kernel: KernelName | None = field(default=None, repr=False)
    """The folder's name where a problem is filed; None for other rows."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Row | None:
        """The row of a record's JSON object; None for one of another type. Raises `RecordError` for no record."""
        kind = data.get("type")
        if kind not in KINDS:
            return None
        try:
            problem, at, kernel = _validated(str(kind), data)
        except RecordError:
            raise
        except MALFORMED as error:
            raise RecordError(f"not a {kind}: {type(error).__name__}: {error}") from error
        line = canonical_line(data)
        return cls(str(kind), problem, at, line, hashlib.sha256(line).hexdigest(), kernel)

    @classmethod
    def read(cls, raw: bytes) -> Row | None:
        """The row of one line of a file; see `of`."""
        try:
            data = decode(raw)
        except RecordError:
            raise
        except MALFORMED as error:
            raise RecordError(f"not a line of JSON: {type(error).__name__}: {error}") from error
        return cls.of(data)

    @property
    def data(self) -> dict[str, Any]:
        """The record as JSON has it."""
        results: dict[str, Any] = json.loads(self.line)
        return results

    @property
    def order(self) -> tuple[object, ...]:
        """Sort key of rows: problems first, oldest first; comparisons after other times of the same second."""
        return KINDS.index(self.kind), self.at, _IN_TURNS in self.line, self.problem, self.digest


def _validated(kind: str, data: Mapping[str, Any]) -> tuple[str, str, KernelName | None]:
    if kind == PROBLEM:
        problem = Problem.from_json(data)
        return problem.id, "", kernel_of(problem)
    if kind == MEASUREMENT:
        measurement = Measurement.from_json(data)
        hash(measurement.candidate)
        return measurement.problem, measurement.at, None
    decision = Decision.from_json(data)
    hash(decision.chosen)
    return decision.problem, decision.at, None


@dataclass
class KernelRows:
    """The rows of one kernel on one device class."""

    problems: dict[str, Row] = field(default_factory=dict)
    """By problem id."""
    measurements: dict[str, Row] = field(default_factory=dict)
    """By digest."""
    decisions: dict[str, Row] = field(default_factory=dict)
    """By problem id."""

    @classmethod
    def of(cls, rows: Iterable[Row]) -> KernelRows:
        """The set of these rows."""
        result = cls()
        for row in rows:
            result.add(row)
        return result

    def add(self, row: Row) -> bool:
        """Put a row in; whether that changed the set."""
        if not self.would_change(row):
            return False
        if row.kind == MEASUREMENT:
            self.measurements[row.digest] = row
        else:
            (self.problems if row.kind == PROBLEM else self.decisions)[row.problem] = row
        return True

    def missing_from(self, other: KernelRows) -> list[Row]:
        """Rows that would change `other`, in order."""
        return sorted((row for row in self if other.would_change(row)), key=lambda row: row.order)

    def would_change(self, row: Row) -> bool:
        """Whether putting a row in changes the set."""
        if row.kind == MEASUREMENT:
            return row.digest not in self.measurements
        current, rank = (self.problems, _fullness) if row.kind == PROBLEM else (self.decisions, _recency)
        return row.problem not in current or rank(row) > rank(current[row.problem])

    def with_problems(self) -> tuple[KernelRows, int]:
        """The rows whose problem is known, and the number of the others, which are of no use."""
        result = KernelRows.of(row for row in self if row.problem in self.problems)
        return result, len(self) - len(result)

    def of_problem(self, problem_id: str) -> list[Row]:
        """The measurements of one problem, in order."""
        results = (row for row in self.measurements.values() if row.problem == problem_id)
        return sorted(results, key=lambda row: row.order)

    def __iter__(self) -> Iterator[Row]:
        yield from self.problems.values()
        yield from self.measurements.values()
        yield from self.decisions.values()

    def __len__(self) -> int:
        return len(self.problems) + len(self.measurements) + len(self.decisions)

    @property
    def digests(self) -> frozenset[str]:
        """Names of all rows: equal for equal sets."""
        return frozenset(row.digest for row in self)


def _fullness(row: Row) -> tuple[int, str]:
    return len(row.line), row.digest


def _recency(row: Row) -> tuple[bool, str, str]:
    """Sort key of decisions: timed ones count more than any that rests on forecasts alone."""
    return b'"median_ms":null' not in row.line, row.at, row.digest
