"""Measurement tables of a recorded pool: a problem per kernel and shape, its sources as variants.

IR is traced here, on the null device, and what surrogates read of it is kept as stores keep it
(`features.stored_facts`), so that they are asked and fitted without IR; its texts only if asked for. What the
sources are is under `sources` in the problem, by the name that their measurements have as `variant`: name,
origin, note and what became of them; their texts are with a kernel's first shape alone.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.processes.kernel_processes import read_lines
from benchmarks.lib.result_files import say
from benchmarks.lib.search.source_pool import BASE
from benchmarks.lib.variants.corpus_compiling import ShapedCalls
from benchmarks.lib.variants.corpus_preparing import PreparedKernel, PreparedSource, read_pool
from benchmarks.lib.variants.corpus_timing import problems_of_line
from forecast_autotune.errors import VariantError
from forecast_autotune.features.stored_facts import collect_facts
from forecast_autotune.records import Candidate, Config, Measurement, Outcome, Problem
from forecast_autotune.records.problem import FACTS
from forecast_autotune.records.table import Table, table_lines
from forecast_integrations.triton.null_device import null_device
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.problem.lazy_candidates import candidate_grids
from forecast_integrations.triton.standalone import standalone_source
from forecast_integrations.triton.trace import make_tracer


class KernelLines:
    """The lines of one kernel, by what they say."""

    def __init__(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self.problems: list[Problem] = []
        self.protocol = ""
        self.rows: dict[str, list[Mapping[str, Any]]] = {}
        self.ended: dict[str, Mapping[str, Any]] = {}
        for line in lines:
            if "problems" in line:
                self.problems, self.protocol = problems_of_line(line["problems"]), line["protocol"]
            elif "ms" in line:
                self.rows.setdefault(line["source"], []).append(line)
            elif "outcome" in line:
                self.ended[line["source"]] = line


def measurements_of(prepared: PreparedKernel, lines: KernelLines, place: int, at: str) -> list[Measurement]:
    """What was measured at one shape; of a source that is wrong, that its checked config is."""
    problem, shape = lines.problems[place].id, prepared.shapes[place]
    found = []
    for source in prepared.sources:
        ended = lines.ended.get(source.name, {})
        if ended.get("outcome") == Outcome.INCORRECT:
            if config := ended["configs"].get(shape):
                candidate = Candidate(Config.from_json(config), source.variant)
                extra = {"message": ended["detail"][shape]}
                found.append(Measurement(problem, candidate, Outcome.INCORRECT, at=at, extra=extra))
            continue
        if place not in source.shapes:
            continue
        for row in lines.rows.get(source.name, ()):
            cell = row["ms"][source.shapes.index(place)]
            candidate = Candidate(Config.from_json(row["config"]), source.variant)
            usual: dict[str, Any] = {"compile_s": row["compile_s"], "protocol": lines.protocol, "at": at}
            if isinstance(cell, str):
                extra = {"message": row["message"]} if place == source.shapes[0] and "message" in row else {}
                found.append(Measurement(problem, candidate, Outcome(cell), **usual, extra=extra))
                continue
            middle, low, high, repeats = cell
            extra = {name: row[name] for name in ("shared", "registers", "spills") if name in row}
            found.append(
                Measurement(
                    problem, candidate, Outcome.OK, middle, low, high, repeats=repeats, **usual, extra=extra
                )
            )
    return found


def tables_of_kernel(
    prepared: PreparedKernel, lines: KernelLines, at: str, ttir: bool, workers: int
) -> Iterator[Table]:
    """A table per shape, with grids and facts; on the null device."""
    shaped = ShapedCalls.of(prepared, "meta")
    for source in prepared.sources:
        try:
            shaped.add(source)
        except VariantError as error:
            say(f"{source.name}: {error}"[:200])
    texts: dict[str, dict[str, str]] = {}
    for place, call in enumerate(shaped.calls):
        case, problem = shaped.cases[place], lines.problems[place]
        rows = measurements_of(prepared, lines, place, at)
        if not rows:
            continue
        wanted = dict.fromkeys(m.candidate for m in rows if m.candidate in call.configs)
        narrow = KernelCall(
            call.tuner, call.args, call.kwargs, {c: call.configs[c] for c in wanted}, call.functions
        )
        grids = candidate_grids(narrow, call.grid, call.arguments())
        rows = [replace(m, grid=grids.get(m.candidate)) for m in rows]
        known = texts.setdefault(prepared.kinds[place], {})
        traced = make_tracer(narrow, known, workers)(list(wanted))
        told = {"label": case.name, "family": case.family, "hand": case.hand}
        sources = {one.variant: _told(prepared, one, lines, place == 0) for one in prepared.sources}
        whole = replace(problem, ttir=traced, extra={**problem.extra, **told, "sources": sources})
        facts = {FACTS: _facts(whole, rows, traced)}
        kept = traced if ttir else {}
        yield Table(replace(whole, ttir=kept, extra={**whole.extra, **facts}), rows)


def _told(prepared: PreparedKernel, source: PreparedSource, lines: KernelLines, text: bool) -> dict[str, str]:
    """What a problem says of a source."""
    found = {"name": source.name, "origin": source.origin, "note": source.note}
    if source.name in lines.ended:
        found["outcome"] = lines.ended[source.name]["outcome"]
    if text:
        base = standalone_source(prepared.cases()[0].kernel) if source.variant == BASE else ""
        found["text"] = base if source.record is None else source.record.source
    return found


def _facts(problem: Problem, rows: Sequence[Measurement], ttir: Mapping[str, str]) -> dict[str, Any]:
    """What a surrogate reads of the measured candidates' IR, as a store keeps it; six digits of each number."""
    grids = {m.candidate: m.grid for m in rows if m.grid}
    candidates = list(dict.fromkeys(m.candidate for m in rows))
    found = collect_facts(problem, candidates, grids, ttir, within_s=math.inf)
    for unit in found["units"]:
        unit[2] = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in unit[2].items()}
    return found


def packed_tables(path: Path, pool: Path, ttir: bool, workers: int) -> Iterator[Table]:
    """The tables of a recording of a pool."""
    by_kernel: dict[str, list[dict[str, Any]]] = {}
    at = ""
    for line in read_lines(path):
        by_kernel.setdefault(line.get("case", ""), []).append(line)
        at = line["origin"]["date"] if "origin" in line else at
    with null_device():
        for prepared in read_pool(pool):
            lines = KernelLines(by_kernel.get(prepared.kernel, []))
            if lines.problems:
                yield from tables_of_kernel(prepared, lines, at, ttir, workers)


def write_packed(path: Path, pool: Path, to: Path, ttir: bool, workers: int) -> int:
    """Write the tables of a recording, gzipped; returns how many measurements."""
    count = 0
    # mtime=0: the same recording gives the same bytes.
    with to.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
        for table in packed_tables(path, pool, ttir, workers):
            packed.writelines(line.encode() for line in table_lines([table]))
            count += len(table.measurements)
    return count


def source_texts(tables: Sequence[Table]) -> dict[str, dict[str, str]]:
    """Texts of sources by kernel, then by variant; see the module."""
    found: dict[str, dict[str, str]] = {}
    for table in tables:
        kernel = table.problem.extra["label"].partition("/")[0]
        told = table.problem.extra["sources"]
        found.setdefault(kernel, {}).update({v: one["text"] for v, one in told.items() if "text" in one})
    return found
