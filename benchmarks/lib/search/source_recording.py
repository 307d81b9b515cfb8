"""Time sources of kernels, each with many configs, on a device: what searches are replayed against.

Kernel by kernel: a process without a device compiles everything on all cores, and traces its IR, while
another process checks and times the sources of the kernel before. Both share Triton's cache. Sources are
checked in the timing process against the case's reference before anything of them is timed; lines are on disk
as they come (see `kernel_processes`), and a further call goes on where this one ended.

Times are medians of launches with L2 flushed before each, as the decorator takes them: a config that is far
slower than the best gets only a few. At the end of a kernel the fastest of all sources are timed in turns,
for longer, and these times stand; `in_turns` says how far the two disagree.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from benchmarks import kernels
from benchmarks.lib import devices
from benchmarks.lib.environment import environment
from benchmarks.lib.processes import child_processes
from benchmarks.lib.processes.kernel_processes import (
    MOST_SILENT_KERNELS,
    append_line,
    open_case,
    print_line,
    read_lines,
    report_each_source,
    run_in_children,
)
from benchmarks.lib.result_files import say
from benchmarks.lib.search.source_pool import (
    BASE,
    PooledSource,
    SourcePool,
    kernel_sources,
    read_compiled_ahead,
    recorded_case,
)
from benchmarks.lib.variants import variant_corpus
from benchmarks.lib.variants.rewrite_cases import NEVER_RAN, variant_failure
from benchmarks.lib.variants.variant_forecasts import file_digest
from forecast_autotune.records import Candidate, Measurement, Outcome, digest
from forecast_autotune.tuning.loop import utc_now
from forecast_integrations.triton.compile.pool import make_pool
from forecast_integrations.triton.null_device import null_device
from forecast_integrations.triton.problem.lazy_candidates import candidate_grids
from forecast_integrations.triton.timer.measurer import TritonMeasurer
from forecast_integrations.triton.trace import make_tracer

COMPILE_S = 20.0
"""A compilation that takes longer is given up: that is a label of its own."""
COMPILE_AHEAD_S = 300.0
"""Seconds that compiling one kernel ahead may take; the timing process compiles what is missing."""
FINALISTS = 8
"""Sources whose best config is timed in turns with the base's at the end."""
FINALIST_GAP = 0.2
"""log2(time / best): no source is a finalist that is slower by more."""


# --- compiling, in a child without a device ---


def compile_kernel(given: Mapping[str, Any]) -> None:
    """Compile and trace all candidates of a kernel that are wanted; leave what became of it in a file."""
    (case,) = kernels.cases([given["case"]])
    begin = time.perf_counter()
    with null_device():
        pool = SourcePool.of(case, case.make("meta"), given["mechanical"], given["each"])
        wanted = [c for name in given["variants"] for c in pool.listed[name]]
        compiling = make_pool(pool.call.compile, given["workers"], COMPILE_S, "fork")
        compiling.schedule(wanted)
        rows: dict[str, list[Any]] = {}
        for _ in wanted:
            done = compiling.next()
            assert done is not None  # it waits for as long as it takes
            outcome = done.outcome if done.error is None else Outcome.COMPILE_ERROR
            said = done.message if done.error is None else repr(done.error)
            if outcome is not Outcome.INFRASTRUCTURE:
                rows[str(done.candidate)] = [round(done.seconds, 4), outcome and str(outcome), said[:500]]
        compiling.close()
        ttir = make_tracer(pool.call, {}, given["workers"])(wanted)
    part = Path(given["ahead"]).with_suffix(".part")
    part.write_text(json.dumps({"rows": rows, "ttir": dict(ttir)}), encoding="utf-8")
    part.replace(given["ahead"])
    failed = sum(row[1] is not None for row in rows.values())
    seconds = round(time.perf_counter() - begin, 1)
    print_line({"case": case.name, "compiled": len(rows) - failed, "failed": failed, "seconds": seconds})


# --- timing, in a child of one kernel ---


def time_kernel(given: Mapping[str, Any], null: bool) -> None:
    """Print the problem, a line per measurement, one per source, and how finalists fared in turns."""
    (case,) = kernels.cases([given["case"]])
    with open_case(case, null) as (where, data):
        pool = SourcePool.of(case, data, given["mechanical"], given["each"])
        timing = _SourceTimer(pool, data, where, given)
        with contextlib.closing(timing):
            print_line({"case": case.name, "problem": timing.problem.to_json()})
            marks = {name: pool.sources[name].mark for name in given["variants"]}
            report_each_source(case.name, where, marks, timing.of)
            timing.in_turns()


class _SourceTimer:
    """Sources of one kernel on its device."""

    def __init__(self, pool: SourcePool, data: kernels.Data, where: str, given: Mapping[str, Any]) -> None:
        self.pool, self.data, self.where = pool, data, where
        self.problem = pool.problem(data)
        self._expected = None if where == "meta" else pool.case.reference(data)
        self._grids = candidate_grids(pool.call, data["grid"], pool.call.arguments())
        self._ahead: dict[str, list[Any]] = read_compiled_ahead(Path(given["ahead"]))["rows"]
        ready = [c for c in pool.candidates if self._compiled(c) == (True, None)]
        self._best: dict[str, Measurement] = {}
        self._measurer = TritonMeasurer(
            pool.call,
            self.problem.id,
            workers=given["workers"],
            timeout_s=given["limit"] / 2,
            guard=lambda candidate: contextlib.nullcontext(),
            say=lambda candidate: None,
            compiler="fork",
            compiled=ready,
        )

    def close(self) -> None:
        """Free what measuring needs."""
        self._measurer.close()

    def of(self, name: str) -> dict[str, Any]:
        """Check one source, and time its configs; a line is printed for each."""
        source, listed = self.pool.sources[name], self.pool.listed[name]
        if self.where != "meta" and (wrong := self._refusal(source, listed)):
            return {"outcome": "compile_error" if wrong == NEVER_RAN else "incorrect", "detail": wrong[:400]}
        kernels.reset(self.pool.case, self.data)
        rows = []
        for row in self._measured(listed):
            rows.append(row)
            self._tell(name, row)
        fine = [m for m in rows if m.ok]
        if not fine:
            return {"outcome": str(rows[0].outcome), "timed": 0, "tried": len(rows)}
        best = min(fine, key=lambda m: m.ms)
        if wrong := self._wrong(best.candidate):
            return {"outcome": "incorrect", "detail": f"{best.candidate.config}: {wrong}"[:400]}
        self._best[name] = best
        told = {"outcome": "ok", "timed": len(fine), "tried": len(rows)}
        if BASE in self._best:
            told["log2_ratio"] = round(math.log2(self._best[name].ms / self._best[BASE].ms), 4)
        return told

    def in_turns(self) -> None:
        """Time the fastest sources in turns with the base; print measurements and the noise."""
        if BASE not in self._best or len(self._best) < 2:
            return  # a process that went on with a part of the sources
        others = sorted((n for n in self._best if n != BASE), key=lambda n: self._best[n].ms)
        least = min(m.ms for m in self._best.values())
        close = [n for n in others[:FINALISTS] if math.log2(self._best[n].ms / least) <= FINALIST_GAP]
        names = [BASE, *close]
        again = self._measurer.compare([self._best[n].candidate for n in names])
        for name, row in zip(names, again, strict=False):
            self._tell(name, row)
        apart = [round(math.log2(m.ms / self._best[n].ms), 5) for n, m in zip(names, again, strict=False)]
        print_line({"case": self.pool.case.name, "in_turns": dict(zip(names, apart, strict=False))})

    def _measured(self, listed: Sequence[Candidate]) -> Iterator[Measurement]:
        """What could not be compiled ahead, then the others as they are timed."""
        for candidate in listed:
            known, failure = self._compiled(candidate)
            if known and failure is not None:
                yield self._failed(candidate, failure)
        left = [c for c in listed if self._compiled(c)[1] is None]
        for row in self._measurer.measure(left):
            seconds = self._ahead.get(str(row.candidate), [row.compile_s])[0]
            yield replace(row, compile_s=seconds)

    def _compiled(self, candidate: Candidate) -> tuple[bool, Outcome | None]:
        """Whether it was compiled ahead, and as what it failed."""
        row = self._ahead.get(str(candidate))
        return row is not None, None if row is None or row[1] is None else Outcome(row[1])

    def _failed(self, candidate: Candidate, outcome: Outcome) -> Measurement:
        seconds, _, message = self._ahead[str(candidate)]
        extra = {"message": message}
        return Measurement(self.problem.id, candidate, outcome, compile_s=seconds, at=utc_now(), extra=extra)

    def _tell(self, name: str, row: Measurement) -> None:
        placed = replace(row, grid=self._grids.get(row.candidate))
        print_line({"case": self.pool.case.name, "variant": name, "measurement": placed.to_json()})

    def _refusal(self, source: PooledSource, listed: Sequence[Candidate]) -> str:
        """Why a source is not timed: what is wrong with its first configs that can be launched."""
        fine = [c for c in listed if self._compiled(c)[1] is None]
        if source.record is None:
            found = (self._wrong(c) for c in fine)
            return next((wrong for wrong in found if wrong != NEVER_RAN), NEVER_RAN)
        for at in range(0, len(fine), 2):  # many configs of a sample may want too much memory
            narrow = replace(source.record, configs=tuple(c.config for c in fine[at : at + 2]))
            wrong = variant_failure(self.pool.case, narrow, self.data, self._expected)
            if wrong != NEVER_RAN:
                return wrong
        return NEVER_RAN

    def _wrong(self, candidate: Candidate) -> str:
        """What is wrong with a launch of one config; empty where it is right, or there is no device."""
        if self.where == "meta":
            return ""
        kernels.reset(self.pool.case, self.data)
        try:
            self.pool.call.launch_once(candidate)
            devices.synchronize()
        except Exception as error:  # too much shared memory for this config, perhaps
            say(f"{self.pool.case.name} {candidate}: {type(error).__name__}")
            return NEVER_RAN
        return kernels.mismatch(self.pool.case, self.data, self._expected)


# --- the parent ---


@dataclass
class _PendingKernel:
    """What is left of one kernel."""

    case: str
    names: list[str]
    given: dict[str, Any] = field(default_factory=dict)


def record_kernels(script: str, a: Namespace) -> int:
    """Time what is not in the file yet, kernel by kernel; returns 1 when something is left.

    `a` has `out`, `only`, `mechanical`, `each`, `workers`, `seconds`, `limit` and `null`. Raises `ValueError`
    where the file was recorded with other options, which would mix two pools.
    """
    a.out.parent.mkdir(parents=True, exist_ok=True)
    before = read_lines(a.out)
    head = {
        "origin": environment(0),
        "null": a.null,
        "variants": file_digest(variant_corpus.TABLE),
        "each": a.each,
        "mechanical": a.mechanical,
    }
    for line in before:
        differ = [k for k in ("null", "variants", "each", "mechanical") if k in line and line[k] != head[k]]
        if "origin" in line and differ:
            raise ValueError(f"{a.out} was recorded with other {', '.join(differ)}: give another file")
    done = {(line["case"], line["variant"]) for line in before if "outcome" in line}
    work = _pending_kernels(a, done)
    say(f"{len(work)} kernels, {sum(len(w.names) for w in work)} sources to be timed")
    with a.out.open("a", encoding="utf-8") as out, tempfile.TemporaryDirectory(prefix="sources-") as scratch:
        append_line(out, head)
        left = _record_all(script, a, out, work, Path(scratch))
    say(f"{left} sources are left" if left else "all sources are timed")
    return int(left > 0)


def _pending_kernels(a: Namespace, done: set[tuple[str, str]]) -> list[_PendingKernel]:
    """Kernels in an order that mixes families, with what is left of their sources."""
    only = [n for n in a.only.split(",") if n]
    found = sorted(
        {one.kernel for one in variant_corpus.variant_sources(only or None)}, key=lambda k: digest("pool", k)
    )
    work = []
    for kernel in found:
        case = recorded_case(kernel)
        names = [one.name for one in kernel_sources(case, a.mechanical) if (case.name, one.name) not in done]
        if names:
            work.append(_PendingKernel(case.name, names))
    return work


def _record_all(script: str, a: Namespace, out: TextIO, work: Sequence[_PendingKernel], scratch: Path) -> int:
    """Compile ahead in one thread, time in this one; how many sources are left."""
    begin, empty, left = time.perf_counter(), 0, 0
    stopped: list[str] = []

    def late() -> bool:
        return bool(stopped) or time.perf_counter() - begin > float(a.seconds)

    with ThreadPoolExecutor(1) as compiler:
        ahead = []
        for number, one in enumerate(work):
            one.given = {
                "case": one.case,
                "mechanical": a.mechanical,
                "each": a.each,
                "workers": a.workers,
                "limit": a.limit,
                "ahead": str(scratch / f"{number}.json"),
            }
            ahead.append(compiler.submit(partial(_compile_ahead, script, a, one, scratch, late)))
        for one, compiled in zip(work, ahead, strict=True):
            compiled.result()
            if late():
                left += len(one.names)
                continue
            if ttir := read_compiled_ahead(Path(one.given["ahead"]))["ttir"]:
                append_line(out, {"case": one.case, "ttir": ttir})
            # Every core is at work on the next kernel.
            given = {**one.given, "workers": 2}
            made = run_in_children(script, a, out, "time", one.names, given, scratch)
            left += len(one.names) - made
            empty = empty + 1 if made == 0 else 0
            seconds = time.perf_counter() - begin
            say(f"{one.case}: {made} of {len(one.names)} sources, {seconds:.0f} s so far")
            if empty >= MOST_SILENT_KERNELS:
                stopped.append("nothing works")
                say(f"{empty} kernels in a row gave nothing: something else is wrong, so nothing is started")
    return left


def _compile_ahead(script: str, a: Namespace, one: _PendingKernel, scratch: Path, late: Any) -> None:
    """Have one kernel compiled; without that, it is compiled where it is timed."""
    if late():
        return
    command = child_processes.child_command(script, a, "compile", {**one.given, "variants": one.names})
    try:
        said = child_processes.run_child(command, child_processes.child_environment(scratch), COMPILE_AHEAD_S)
    except Exception as error:
        say(f"{one.case}: not compiled ahead: {str(error)[-300:]}")
        return
    rate = (said["compiled"] + said["failed"]) / max(0.1, said["seconds"])
    say(f"{one.case}: {said['compiled']} compiled, {said['failed']} failed, {rate:.1f} a second")
