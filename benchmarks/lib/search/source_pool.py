"""All sources of a kernel with configs of each, and the table of what became of them.

The sources are the base kernel, the variants that a language model wrote (`variants`), and our own rewrites
of the base. Of each, at most so many configs are in the pool: those with the lowest digests, so that sources
which can run a config in common have it in common, and nobody's taste decides. A recording is JSON Lines
(`source_recording`); `tables_of_recording` makes measurement tables of it, a problem per
kernel, with IR and grids. What the sources are is under `kernel_sources` in the problem, by the name that
their measurements have as `variant`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import kernels
from benchmarks.lib.processes.harvest_worker import table_facts
from benchmarks.lib.processes.kernel_processes import read_lines
from benchmarks.lib.variants import variant_corpus
from benchmarks.lib.variants.rewrite_cases import rewrites_of_case
from benchmarks.lib.variants.variant_forecasts import call_with_variants, first_cases_of
from forecast_autotune.records import Candidate, Measurement, Problem, digest
from forecast_autotune.records.codec import Record
from forecast_autotune.records.table import Table, table_lines
from forecast_autotune.variants import Variant
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.standalone import standalone_source

BASE, LLM, MECHANICAL = "base", "llm", "mechanical"


@dataclass(frozen=True)
class PooledSource(Record, order=("name", "origin", "note", "text")):
    """One source of a kernel."""

    name: str
    """`base`, `<kernel>/<NN_short_name>` of what a model wrote, `<kernel>/<name>` of a rewrite."""
    variant: str
    """What its measurements are filed under."""
    origin: str
    """`base`, `llm` or `mechanical`."""
    text: str
    note: str = ""
    """What it does, in words: a model's summary, or the rewrites."""
    record: Variant | None = None
    """None for the base."""

    @property
    def mark(self) -> str:
        """sha256 of the text, its beginning."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def kernel_sources(case: kernels.Case, mechanical: int) -> list[PooledSource]:
    """The base, then what a model wrote, then at most so many rewrites that are none of these."""
    kernel = case.name.partition("/")[0]
    found = [PooledSource(BASE, BASE, BASE, standalone_source(case.kernel))]
    for one in variant_corpus.variant_sources([kernel]):
        record = one.record()
        found.append(PooledSource(one.name, record.name, LLM, one.text, one.summary, record))
    for record in rewrites_of_case(case, limit=mechanical) if mechanical else ():
        note = "+".join(record.extra["rewrites"])
        found.append(
            PooledSource(f"{kernel}/{record.name}", record.name, MECHANICAL, record.source, note, record)
        )
    return list({one.variant: one for one in reversed(found)}.values())[::-1]


@dataclass(frozen=True)
class SourcePool:
    """A call of a kernel with its sources, and which configs of each are in the pool."""

    case: kernels.Case
    call: KernelCall
    sources: Mapping[str, PooledSource]
    """By name, in the order in which they are timed."""
    listed: Mapping[str, tuple[Candidate, ...]]
    """By name of the source."""

    @classmethod
    def of(cls, case: kernels.Case, data: kernels.Data, mechanical: int, each: int) -> SourcePool:
        """All sources of a case, `each` configs of every source at most."""
        found = kernel_sources(case, mechanical)
        call = call_with_variants(case, data, [one.record for one in found if one.record is not None])
        by: dict[str, list[Candidate]] = {one.variant: [] for one in found}
        for candidate in call.configs:
            by[candidate.variant].append(candidate)
        chosen = {one.name: sample_candidates(case.name, by[one.variant], each) for one in found}
        return cls(case, call, {one.name: one for one in found}, chosen)

    @property
    def candidates(self) -> list[Candidate]:
        """Of all sources, in order."""
        return [c for listed in self.listed.values() for c in listed]

    def problem(self, data: kernels.Data) -> Problem:
        """What is tuned on the active device, labelled, with its sources; without IR."""
        case, named = self.case, self.call.arguments()
        record = describe.kernel_record(case.kernel)
        key = [named.get(k) for k in case.key]
        found = describe.describe(case.kernel, record, named, key, data["grid"])
        told = {one.variant: one.to_json() for one in self.sources.values()}
        extra = {"label": case.name, "family": case.family, "hand": case.hand, "sources": told}
        return replace(found, extra={**found.extra, **extra})


def sample_candidates(case: str, own: Sequence[Candidate], each: int) -> tuple[Candidate, ...]:
    """At most `each` candidates of a source, in the order of a digest of their configs."""
    kernel = case.partition("/")[0]
    return tuple(sorted(own, key=lambda c: digest("pool", kernel, str(c.config)))[:each])


def recorded_case(kernel: str) -> kernels.Case:
    """The first shape of a kernel: the one that is recorded."""
    return first_cases_of(kernel, 1)[0]


def tables_of_recording(path: Path) -> list[Table]:
    """A table per kernel of a recording; what each source came to is its `outcome` under `kernel_sources`.

    Of a source that was never ended there are the measurements alone, and no outcome.
    """
    problems: dict[str, Problem] = {}
    texts: dict[str, dict[str, str]] = {}
    rows: dict[str, list[Measurement]] = {}
    became: dict[str, dict[str, str]] = {}
    for line in read_lines(path):
        case = line.get("case", "")
        if "problem" in line:
            problems[case] = Problem.from_json(line["problem"])
        elif "ttir" in line:
            texts.setdefault(case, {}).update(line["ttir"])
        elif "measurement" in line:
            rows.setdefault(case, []).append(Measurement.from_json(line["measurement"]))
        elif "outcome" in line:
            became.setdefault(case, {})[line["variant"]] = line["outcome"]
    return [
        _table(problem, texts.get(case, {}), rows.get(case, []), became.get(case, {}))
        for case, problem in problems.items()
        if case in rows
    ]


def _table(
    problem: Problem, ttir: Mapping[str, str], rows: Sequence[Measurement], became: Mapping[str, str]
) -> Table:
    told = {
        variant: {**one, **({"outcome": became[one["name"]]} if one["name"] in became else {})}
        for variant, one in problem.extra["sources"].items()
    }
    whole = replace(problem, ttir=dict(ttir), extra={**problem.extra, "sources": told})
    # A recording that was taken up on another device of the model is still of one problem.
    table = Table(whole, [replace(m, problem=problem.id) for m in rows])
    facts = {"facts": table_facts(table)}
    return Table(replace(whole, extra={**whole.extra, **facts}), table.measurements)


def write_tables(recording: Path, to: Path) -> int:
    """Write the tables of a recording, gzipped; returns how many measurements."""
    found = tables_of_recording(recording)
    # mtime=0: the same recording gives the same bytes.
    with to.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
        packed.writelines(line.encode() for line in table_lines(found))
    return sum(len(table.measurements) for table in found)


def read_compiled_ahead(path: Path) -> dict[str, Any]:
    """What a process that compiled ahead has left in its file; nothing where it left none."""
    empty: dict[str, Any] = {"rows": {}, "ttir": {}}
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else empty
