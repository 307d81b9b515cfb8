"""What a language model is trained on: one shared prefix, several candidates, and what became of them.

An `Example` is what the surrogate would have asked at some point of a decision, with the answers. On disk
it is one Parquet row per candidate, which `datasets` loads as it is; rows of one example share `example`
and `prefix`. Where pyarrow is not to be had, the same rows are JSON Lines in a `.jsonl.gz`.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forecast_autotune.errors import RecordError
from forecast_autotune.file_access import open_named_output
from forecast_autotune.llm.bins import BINS
from forecast_autotune.records import digest

Array = npt.NDArray[np.float64]

JSON_LINES_SUFFIX = ".jsonl.gz"
"""Ending of the files that need no pyarrow."""


@dataclass(frozen=True)
class ExampleOrigin:
    """Where an example comes from: what it may be split and grouped by."""

    problem: str
    kernel: str
    family: str
    hand: str
    device: str
    source: str
    """Hash of the source that comments, layout and the function's name do not change."""
    at: str
    """When its last measurement was taken, UTC, ISO 8601; empty: not known."""


@dataclass(frozen=True)
class ExampleCandidate:
    """One candidate of an example."""

    suffix: str
    variant: str
    config: str
    outcome: str
    log2_ratio: float
    """Measured log2(time / reference time); NaN: it failed."""
    log2_sd: float
    """Of one timing, from its 20th and 80th percentile; NaN: not known."""
    propensity: float
    """Probability with which an audit drew it; NaN: the policy chose it, or everything was measured."""

    @property
    def label(self) -> int:
        """Its bin, or "fails"."""
        return BINS.failure_index if math.isnan(self.log2_ratio) else int(BINS.index(self.log2_ratio))


@dataclass(frozen=True)
class Example:
    """One question with its answers."""

    origin: ExampleOrigin
    version: str
    """Of the prompt."""
    prefix: str
    reference_log2_ms: float
    measured: bool
    """Whether the reference was measured; else it was an estimate, and ratios are to its true time."""
    known: int
    """Own measurements that the prefix shows."""
    candidates: tuple[ExampleCandidate, ...]

    @property
    def id(self) -> str:
        """A digest of the question."""
        return digest(self.version, self.prefix, [a.suffix for a in self.candidates])

    def log2_ratios(self) -> Array:
        """Measured log2(time / reference time) of the candidates, [n]; NaN: failed."""
        return np.array([a.log2_ratio for a in self.candidates])

    def labels(self) -> npt.NDArray[np.intp]:
        """Bin per candidate, or "fails", [n]."""
        return np.array([a.label for a in self.candidates], dtype=np.intp)


_ORIGIN_FIELDS = tuple(ExampleOrigin.__dataclass_fields__)
_CANDIDATE_FIELDS = tuple(ExampleCandidate.__dataclass_fields__)
_SHARED_FIELDS = ("version", "prefix", "reference_log2_ms", "measured", "known")


def example_columns(examples: Iterable[Example]) -> dict[str, list[Any]]:
    """One row per candidate, column by column; NaN becomes null, which every reader understands."""
    names = ("example", *_ORIGIN_FIELDS, *_SHARED_FIELDS, *_CANDIDATE_FIELDS, "label")
    found: dict[str, list[Any]] = {name: [] for name in names}
    for e in examples:
        shared = {"example": e.id, **vars(e.origin), **{n: getattr(e, n) for n in _SHARED_FIELDS}}
        for a in e.candidates:
            for name, value in {**shared, **vars(a), "label": a.label}.items():
                found[name].append(None if isinstance(value, float) and math.isnan(value) else value)
    return found


def write_examples(path: Path, examples: Sequence[Example]) -> int:
    """Write a Parquet file, or JSON Lines for a name in `.jsonl.gz`, atomically; returns the rows' number."""
    data = example_columns(examples)
    if path.name.endswith(JSON_LINES_SUFFIX):
        return _write_lines(path, data)
    import pyarrow
    from pyarrow import parquet

    floats = {"log2_ratio", "log2_sd", "propensity", "reference_log2_ms"}
    fields = [(n, pyarrow.float64()) for n in data if n in floats]
    types = {**dict(fields), "known": pyarrow.int64(), "label": pyarrow.int64(), "measured": pyarrow.bool_()}
    schema = pyarrow.schema([(n, types.get(n, pyarrow.string())) for n in data])
    with open_named_output(path) as stream:
        parquet.write_table(pyarrow.table(data, schema=schema), stream, compression="zstd")
    return len(data["example"])


def _write_lines(path: Path, data: Mapping[str, Sequence[Any]]) -> int:
    # mtime=0: the same examples give the same bytes.
    with open_named_output(path) as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
        for row in zip(*data.values(), strict=True):
            packed.write(json.dumps(dict(zip(data, row, strict=True)), allow_nan=False).encode() + b"\n")
    return len(data["example"])


def side_path(folder: Path, side: str) -> Path:
    """The file of one side of a data set: Parquet, or JSON Lines where that is there instead."""
    lines = folder / f"{side}{JSON_LINES_SUFFIX}"
    return lines if lines.is_file() else folder / f"{side}.parquet"


def read_examples(path: Path) -> list[Example]:
    """Read what `write_examples` wrote. Raises `RecordError` for anything else, naming the remedy."""
    try:
        rows = _read_lines(path) if path.name.endswith(JSON_LINES_SUFFIX) else _read_parquet(path)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise RecordError(f"{path}: no data set ({error}): write one with `train data`") from error
    if rows and (
        missing := {"example", *_ORIGIN_FIELDS, *_SHARED_FIELDS, *_CANDIDATE_FIELDS} - rows[0].keys()
    ):
        raise RecordError(f"{path}: columns {sorted(missing)} are missing: write it with `train data`")
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["example"], []).append(row)
    return [_example(group) for group in groups.values()]


def _read_lines(path: Path) -> list[Any]:
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def _read_parquet(path: Path) -> list[Any]:
    import pyarrow
    from pyarrow import parquet

    try:
        return list(parquet.read_table(path).to_pylist())
    except pyarrow.ArrowException as error:
        raise ValueError(error) from error


def _example(rows: Sequence[Mapping[str, Any]]) -> Example:
    asked = []
    for row in rows:
        known: dict[str, Any] = {n: math.nan if row[n] is None else row[n] for n in _CANDIDATE_FIELDS}
        asked.append(ExampleCandidate(**known))
    first = rows[0]
    return Example(
        ExampleOrigin(**{n: first[n] for n in _ORIGIN_FIELDS}),
        **{n: first[n] for n in _SHARED_FIELDS},
        candidates=tuple(asked),
    )
