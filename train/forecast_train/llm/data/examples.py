"""Examples that a language model is trained on: one shared prefix, several candidates, and what became of them.

An `Example` is what the surrogate would have asked at some point of a decision, with the answers. On disk
it is one Parquet row per candidate, which `datasets` loads as it is; rows of one example share `example`
and `prefix`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
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
from forecast_train.splits import rows_by_tool

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ExampleOrigin:
    """The origin of an example: the values to split and group by."""

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
    """Spread of one timing, from its 20th and 80th percentile; NaN: not known."""
    propensity: float
    """Probability with which an audit drew it; NaN: the policy chose it, or everything was measured."""

    @property
    def label(self) -> int:
        """Its bin, or "fails"."""
        return int(BINS.labels_of(self.log2_ratio))


@dataclass(frozen=True)
class Example:
    """One question with its answers."""

    origin: ExampleOrigin
    version: str
    """Version of the prompt."""
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

    def labels(self) -> npt.NDArray[np.intp]:
        """Bin per candidate, or "fails", [n]."""
        return np.array([a.label for a in self.candidates], dtype=np.intp)


_ORIGIN_FIELDS = tuple(ExampleOrigin.__dataclass_fields__)
_CANDIDATE_FIELDS = tuple(ExampleCandidate.__dataclass_fields__)
_SHARED_FIELDS = ("version", "prefix", "reference_log2_ms", "measured", "known")


def _example_columns(examples: Iterable[Example]) -> dict[str, list[Any]]:
    """One row per candidate, column by column; NaN becomes null, which every reader understands."""
    names = ("example", *_ORIGIN_FIELDS, *_SHARED_FIELDS, *_CANDIDATE_FIELDS, "label")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for e in examples:
        common = {"example": e.id, **vars(e.origin), **{n: getattr(e, n) for n in _SHARED_FIELDS}}
        for a in e.candidates:
            for name, value in {**common, **vars(a), "label": a.label}.items():
                columns[name].append(None if isinstance(value, float) and math.isnan(value) else value)
    return columns


def write_examples(path: Path, examples: Sequence[Example]) -> int:
    """Write a Parquet file, atomically; returns the rows' number."""
    import pyarrow
    from pyarrow import parquet

    data = _example_columns(examples)
    floats = {"log2_ratio", "log2_sd", "propensity", "reference_log2_ms"}
    fields = [(n, pyarrow.float64()) for n in data if n in floats]
    types = {**dict(fields), "known": pyarrow.int64(), "label": pyarrow.int64(), "measured": pyarrow.bool_()}
    schema = pyarrow.schema([(n, types.get(n, pyarrow.string())) for n in data])
    with open_named_output(path) as stream:
        parquet.write_table(pyarrow.table(data, schema=schema), stream, compression="zstd")
    return len(data["example"])


def read_examples(path: Path) -> list[Example]:
    """Read what `write_examples` wrote. Raises `RecordError` for anything else, naming the remedy."""
    import pyarrow
    from pyarrow import parquet

    try:
        rows = list(parquet.read_table(path).to_pylist())
    except (OSError, pyarrow.ArrowException) as error:
        raise RecordError(f"{path}: no data set ({error}): write one with `train data`") from error
    if rows and (
        missing := {"example", *_ORIGIN_FIELDS, *_SHARED_FIELDS, *_CANDIDATE_FIELDS} - rows[0].keys()
    ):
        raise RecordError(f"{path}: columns {sorted(missing)} are missing: write it with `train data`")
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["example"], []).append(row)
    return [_example(group) for group in groups.values()]


def _example(rows: Sequence[Mapping[str, Any]]) -> Example:
    candidates = []
    for row in rows:
        fields: dict[str, Any] = {n: math.nan if row[n] is None else row[n] for n in _CANDIDATE_FIELDS}
        candidates.append(ExampleCandidate(**fields))
    first = rows[0]
    return Example(
        ExampleOrigin(**{n: first[n] for n in _ORIGIN_FIELDS}),
        **{n: first[n] for n in _SHARED_FIELDS},
        candidates=tuple(candidates),
    )


def dataset_summary(sides: Mapping[str, Sequence[Example]]) -> dict[str, Any]:
    """Counts by side: examples, rows, kernels, families, devices, rows per label, outcomes."""
    return {side: _counts(examples) for side, examples in sides.items()}


def _counts(examples: Sequence[Example]) -> dict[str, Any]:
    rows = [a for e in examples for a in e.candidates]
    labels = Counter(a.label for a in rows)
    return {
        "examples": len(examples),
        "rows": len(rows),
        "problems": len({e.origin.problem for e in examples}),
        "kernels": sorted({e.origin.kernel for e in examples}),
        "families": sorted({e.origin.family for e in examples}),
        "devices": sorted({e.origin.device for e in examples}),
        "labels": {BINS.labels[k].token: labels[k] for k in range(len(BINS) + 1)},
        "outcomes": dict(sorted(Counter(a.outcome for a in rows).items())),
        "tools": rows_by_tool(e.origin.hand for e in examples for _ in e.candidates),
        "measured references": sum(e.measured for e in examples),
        "versions": sorted({e.version for e in examples}),
    }


def dataset_card(sides: Mapping[str, Sequence[Example]], about: Mapping[str, Any]) -> str:
    """A data set card in Markdown, with the header that `datasets` reads.

    `about` says how the set was made: split, seed, recipe, releases, the digests of its tables.
    """
    summary = dataset_summary(sides)
    files = "\n".join(f"  - split: {side}\n    path: {side}.parquet" for side in sides)
    table = [
        "| side | examples | rows | problems | kernels | families | devices |",
        "|---|---|---|---|---|---|---|",
    ]
    for side, c in summary.items():
        cells = [
            c["examples"],
            c["rows"],
            c["problems"],
            *(len(c[n]) for n in ("kernels", "families", "devices")),
        ]
        table.append(f"| {side} | {' | '.join(map(str, cells))} |")
    bins = ["| label | meaning | " + " | ".join(sides) + " |", "|---|---|" + "---|" * len(sides)]
    for label in BINS.labels:
        counts = " | ".join(str(c["labels"][label.token]) for c in summary.values())
        bins.append(f"| {label.token} | {label.meaning} | {counts} |")
    contents = "\n".join(
        f"- {side}: kernels {', '.join(c['kernels']) or 'none'}; devices {', '.join(c['devices']) or 'none'}"
        for side, c in summary.items()
    )
    return f"""---
configs:
- config_name: default
  data_files:
{files}
tags:
- gpu-kernels
- autotuning
---
# Kernel run times as questions to a language model

Each row is one candidate of a question: `prefix` + `suffix` is the prompt, `label` the index of the letter
that was right, `log2_ratio` the measured log2(time / reference time), null where the candidate failed.
Rows with the same `example` share their prefix. `propensity` is the probability with which an audit drew
the candidate; null where a policy chose it or where everything was measured. Failures of the harness are no
labels and are left out. Sides share no family of kernels: the writer refuses to write otherwise.

{chr(10).join(table)}

{chr(10).join(bins)}

{contents}

Made with:

```json
{json.dumps(dict(about), indent=1, sort_keys=True)}
```
"""
