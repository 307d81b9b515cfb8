"""Checking and timing a pool of sources, in the process of one GPU: see `corpus_recording`.

The process takes one kernel after another from its standard input. Of a source, every shape is checked
against the case's reference before anything is timed, and every shape's fastest config after that. A line is
printed per (source, config), and one per source that says what became of it; lines are the parent's to keep.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import kernels
from benchmarks.lib import devices
from benchmarks.lib.processes.kernel_processes import print_line
from benchmarks.lib.result_files import say
from benchmarks.lib.variants.corpus_compiling import CompiledRow, ShapedCalls
from benchmarks.lib.variants.corpus_preparing import PreparedKernel, PreparedSource, read_pool
from benchmarks.lib.variants.rewrite_cases import NEVER_RAN
from forecast_autotune.records import Candidate, Outcome, Problem
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.call import KernelCall, outcome_of
from forecast_integrations.triton.timer.measurer import quantiles
from forecast_integrations.triton.timer.timers import EventTimer, TimingLengths
from forecast_integrations.triton.timer.warmup import IDLE_S, keep_busy

LAUNCH_S = 5.0
"""Seconds that one launch may take."""
SOURCE_S = 10.0
"""Seconds after which no further config of a source is begun."""
LOOKED_AT = 4
"""Configs that are tried at most, where the first cannot be launched, to check a source at a shape."""


class BriefTimer(EventTimer):
    """Times in a few milliseconds: a corpus wants many candidates rather than exact ones."""

    def __init__(self, call: KernelCall) -> None:
        super().__init__(call, TimingLengths(look_ms=0.5, full_ms=1.5, contender=1.25))
        self.protocol += "-brief"

    def begin_source(self) -> None:
        """Forget how far the host fell behind with another source."""
        self._flushes = 1

    def time_adaptively(self, candidate: Candidate, best_ms: float) -> list[float]:
        """Milliseconds per launch: two of a candidate that cannot win, up to about 25 of a contender."""
        if time.perf_counter() - self._busy > IDLE_S:
            keep_busy(self._flush, self._interface.synchronize)
        lengths = self._lengths
        times = self._launches([candidate], 2)[0]
        estimate = self._estimates[candidate] = max(min(times), 1e-3)
        if estimate > lengths.hopeless * best_ms:
            return times
        times = self._launches([candidate], _count(lengths.look_ms, estimate, 5))[0]
        if statistics.median(times) > lengths.contender * best_ms:
            return times
        more = _count(lengths.full_ms - lengths.look_ms, estimate, 5)
        return times + self._launches([candidate], more)[0]


def _count(budget_ms: float, estimate_ms: float, least: int) -> int:
    return max(least, min(12, int(budget_ms / (estimate_ms + 0.08))))


class ContextBrokenError(Exception):
    """Nothing runs in this process any more."""


class ShapedTimer:
    """Sources of one kernel on their device, at all its shapes."""

    def __init__(
        self,
        calls: ShapedCalls,
        where: str,
        ahead: Mapping[str, Sequence[CompiledRow]],
        best: Sequence[float | None] = (),
    ) -> None:
        """`ahead` is what was compiled, `best` the least milliseconds so far by shape, where known."""
        self._shaped, self._where, self._ahead = calls, where, ahead
        real = where != "meta"
        self._expected = [
            case.reference(data) if real else None for case, data in zip(calls.cases, calls.data, strict=True)
        ]
        self._timers = [BriefTimer(call) for call in calls.calls]
        self.protocol = self._timers[0].protocol
        self._best = [math.inf if b is None else b for b in best or [None] * len(calls.calls)]
        self._intact: dict[int, Candidate] = {}
        """By shape, a config of the base that was right: it is asked again after a source that was wrong."""

    def problems(self) -> list[dict[str, Any]]:
        """A problem record per shape; the kernel is written once, with the first."""
        found = []
        for case, data, call in zip(self._shaped.cases, self._shaped.data, self._shaped.calls, strict=True):
            named = call.arguments()
            key = [named.get(k) for k in case.key]
            record = describe.kernel_record(case.kernel)
            problem = describe.describe(case.kernel, record, named, key, data["grid"])
            found.append(problem.to_json())
        return [found[0], *({k: v for k, v in one.items() if k != "kernel"} for one in found[1:])]

    def vouch(self, base: PreparedSource) -> None:
        """Check the base where an earlier process has timed it: see `_refusal`."""
        rows = self._ahead.get(base.name, [])
        for place in base.shapes:
            failed = [str(place) in row[1] for row in rows] or [False] * len(base.configs)
            fine = [c for c, bad in zip(base.configs, failed, strict=False) if not bad][:1]
            runs = [Candidate(config, base.variant) for config in fine]
            wrong, candidate = self._check(place, runs)
            if candidate is not None and not wrong:
                self._intact[place] = candidate

    def of(self, source: PreparedSource) -> Iterator[dict[str, Any]]:
        """Check and time one source: a line per config, and at last what became of it."""
        begin = time.perf_counter()
        rows = self._ahead.get(source.name, [])
        runs = [Candidate(config, source.variant) for config in source.configs]
        try:
            self._shaped.add(source)
        except Exception as error:
            yield {"outcome": "compile_error", "detail": f"{type(error).__name__}: {error}"[:300]}
            return
        for timer in self._timers:
            timer.begin_source()
        refused = {}
        for place in source.shapes:
            fine = [c for c, row in zip(runs, rows, strict=False) if str(place) not in row[1]]
            wrong, checked = self._check(place, fine)
            if wrong and checked is not None:
                refused[place] = (wrong, checked)
        if refused:
            yield self._refusal(source, refused)
            return
        timed, fastest = 0, dict[int, tuple[float, Candidate]]()
        for candidate, row in zip(runs, rows, strict=False):
            if time.perf_counter() - begin > SOURCE_S:
                break
            line = self._row(candidate, row, source.shapes)
            for place, cell in zip(source.shapes, line["ms"], strict=True):
                if isinstance(cell, list):
                    timed += 1
                    if place not in fastest or cell[0] < fastest[place][0]:
                        fastest[place] = (cell[0], candidate)
                    self._best[place] = min(self._best[place], cell[0])
            yield line
        for place, (_, candidate) in fastest.items():
            wrong, _ = self._check(place, [candidate])
            if wrong:
                yield self._refusal(source, {place: (wrong, candidate)})
                return
        if source.record is None:
            self._intact = {place: candidate for place, (_, candidate) in fastest.items()}
        yield {"outcome": "ok" if timed else "never_ran", "timed": timed}

    def close(self) -> None:
        """Free what timing needs."""
        for timer in self._timers:
            timer.close()

    def _refusal(self, source: PreparedSource, wrong: Mapping[int, tuple[str, Candidate]]) -> dict[str, Any]:
        """That a source is wrong; the process ends where it has spoilt the inputs of others."""
        names = self._shaped.prepared.shapes
        found = {
            "outcome": "incorrect",
            "detail": {names[place]: said[:200] for place, (said, _) in wrong.items()},
            "configs": {names[place]: c.config.to_json() for place, (_, c) in wrong.items()},
        }
        others = self._intact if source.record is not None else {}
        spoilt = any(self._check(place, [candidate])[0] for place, candidate in others.items())
        return {**found, "spoilt": True} if spoilt else found

    def _check(self, place: int, fine: Sequence[Candidate]) -> tuple[str, Candidate | None]:
        """What is wrong at a shape with the first config that can be launched, empty for nothing; and which."""
        if self._where == "meta":
            return ("", fine[0]) if fine else (NEVER_RAN, None)
        case, data = self._shaped.cases[place], self._shaped.data[place]
        for candidate in fine[:LOOKED_AT]:
            kernels.reset(case, data)
            try:
                self._timers[place].first(candidate, LAUNCH_S)
            except Exception as error:
                if self._outcome(place, error) is Outcome.TIMEOUT:
                    raise ContextBrokenError(str(error)) from error
                continue
            return kernels.mismatch(case, data, self._expected[place]), candidate
        return NEVER_RAN, None

    def _row(self, candidate: Candidate, compiled: CompiledRow, shapes: Sequence[int]) -> dict[str, Any]:
        """One config at all shapes: [median, 20 %, 80 %, repeats], or why there is no time."""
        seconds, failed = compiled
        cells: list[Any] = []
        facts: dict[str, Any] = {}
        for place in shapes:
            if str(place) in failed:
                cells.append(failed[str(place)][0])
                facts.setdefault("message", failed[str(place)][1])
                continue
            try:
                cells.append(self._times(place, candidate))
                facts = facts or self._compiler_facts(place, candidate)
            except Exception as error:
                outcome = self._outcome(place, error)
                if outcome is Outcome.TIMEOUT:
                    raise ContextBrokenError(str(error)) from error
                cells.append(str(outcome))
                facts.setdefault("message", f"{type(error).__name__}: {error}"[:300])
        return {"config": candidate.config.to_json(), "compile_s": seconds, "ms": cells, **facts}

    def _times(self, place: int, candidate: Candidate) -> list[float]:
        timer = self._timers[place]
        timer.first(candidate, LAUNCH_S)
        times = timer.time_adaptively(candidate, self._best[place])
        low, middle, high = quantiles(times)
        return [round(middle, 6), round(low, 6), round(high, 6), len(times)]

    def _compiler_facts(self, place: int, candidate: Candidate) -> dict[str, Any]:
        kernel: Any = self._shaped.calls[place].compile(candidate)
        found = {
            "shared": getattr(getattr(kernel, "metadata", None), "shared", None),
            "registers": getattr(kernel, "n_regs", None),
            "spills": getattr(kernel, "n_spills", None),
        }
        return {name: int(value) for name, value in found.items() if value is not None}

    def _outcome(self, place: int, error: Exception) -> Outcome:
        """As what a launch counts that failed. Raises where the device's context is gone."""
        if isinstance(error, TimeoutError):
            return Outcome.TIMEOUT
        outcome = outcome_of(error) or Outcome.RUNTIME_ERROR
        if outcome is Outcome.RUNTIME_ERROR and not self._timers[place].is_alive():
            raise ContextBrokenError(f"{type(error).__name__}: {error}"[:300]) from error
        return outcome


def time_pool(given: Mapping[str, Any], null: bool) -> None:
    """Serve kernels from standard input: `{"kernel", "ahead", "sources", "best"}` a line."""
    pool = {one.kernel: one for one in read_pool(Path(given["pool"]))}
    with devices.device(null) as where:
        devices.warm_up_device(where)
        # Kernels that make tensor descriptors themselves ask for memory at every launch.
        triton.set_allocator(
            lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=where)
        )
        kernels.every()
        gc.freeze()  # what is loaded by now stays: collections need not look at it
        print_line({"case": "", "ready": True})
        for text in sys.stdin:
            order = json.loads(text)
            begin = time.perf_counter()
            served = True
            told: dict[str, Any] = {}
            try:
                served = _serve_kernel(pool[order["kernel"]], order, where)
            except torch.AcceleratorError:
                raise  # the device's context is gone
            except Exception as error:  # one kernel less: too little memory for its reference, perhaps
                told = {"failed": f"{type(error).__name__}: {error}"[:300]}
            if not served:
                return
            gc.collect()
            if where == "cuda":
                torch.cuda.empty_cache()
            seconds = round(time.perf_counter() - begin, 2)
            print_line({"case": order["kernel"], "served": True, **told, "seconds": seconds})


def _serve_kernel(prepared: PreparedKernel, order: Mapping[str, Any], where: str) -> bool:
    """Time the sources of one kernel that are asked for; false where this process is good for nothing more."""
    ahead = Path(order["ahead"])
    rows = json.loads(ahead.read_text(encoding="utf-8"))
    timer = ShapedTimer(ShapedCalls.of(prepared, where, ahead.parent), where, rows, order["best"])
    print_line({"case": prepared.kernel, "problems": timer.problems(), "protocol": timer.protocol})
    wanted = [one for one in prepared.sources if one.name in order["sources"]]
    with contextlib.closing(timer):
        if prepared.sources[0] not in wanted:
            timer.vouch(prepared.sources[0])
        return serve_sources(prepared.kernel, timer, wanted)


def serve_sources(kernel: str, timer: ShapedTimer, wanted: Sequence[PreparedSource]) -> bool:
    """Print the lines of sources; false where this process is good for nothing any more."""
    for source in wanted:
        print_line({"case": kernel, "begin": source.name})
        begin = time.perf_counter()
        broken = False
        line: dict[str, Any] = {}
        try:
            for line in timer.of(source):
                if "outcome" not in line:
                    print_line({"case": kernel, "source": source.name, **line})
        except ContextBrokenError as error:
            line, broken = {"outcome": "crash", "detail": str(error)[:300]}, True
        except Exception as error:  # one source less
            line = {"outcome": "runtime_error", "detail": f"{type(error).__name__}: {error}"[:300]}
        seconds = round(time.perf_counter() - begin, 3)
        print_line({"case": kernel, "source": source.name, **line, "seconds": seconds})
        if broken or line.get("spoilt"):
            say(f"{source.name}: another process goes on")
            return False
    return True


def least_times(prepared: PreparedKernel, lines: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """The least milliseconds by shape among lines of a kernel; None where there are none."""
    places = {one.name: one.shapes for one in prepared.sources}
    best: list[float | None] = [None] * len(prepared.shapes)
    for line in lines:
        for place, cell in zip(places.get(line.get("source", ""), ()), line.get("ms", ()), strict=False):
            known = best[place]
            if isinstance(cell, list) and (known is None or cell[0] < known):
                best[place] = cell[0]
    return best


def problems_of_line(given: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """The problems of a `problems` line."""
    return [Problem.from_json({"kernel": given[0]["kernel"], **one}) for one in given]
