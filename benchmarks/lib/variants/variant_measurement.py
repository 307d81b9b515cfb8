"""What becomes of recorded variants on a device: one process per kernel, a line per variant as it comes.

See `kernel_processes` for what a variant that hangs or crashes costs. The first line says where they come
from, and those with `outcome` are what `variant_report` reads.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks import kernels
from benchmarks.lib import devices, kernel_timing
from benchmarks.lib.environment import environment
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
from benchmarks.lib.variants import variant_corpus
from benchmarks.lib.variants.rewrite_cases import NEVER_RAN, variant_failure
from benchmarks.lib.variants.variant_forecasts import (
    call_with_variants,
    file_digest,
    first_cases_of,
    source_mark,
)
from forecast_autotune import autotune
from forecast_autotune.records import Candidate
from forecast_autotune.settings import Settings
from forecast_autotune.variants import Variant
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.timer.measurer import TritonMeasurer

TOP = 2
"""Of the configs that a variant is timed with, so many are the base's fastest, where they are its own too."""


# --- the child of one kernel ---


def measure_kernel(given: Mapping[str, Any], null: bool) -> None:
    """Print a line for the base, and two per variant: that it begins, and what became of it."""
    (case,) = kernels.cases([given["case"]])
    found = {one.name: one for one in variant_corpus.variant_sources(given["variants"])}
    with open_case(case, null) as (where, data):
        options: dict[str, Any] = {"store": False, "reset_to_zero": list(case.reset_to_zero)}
        alone = autotune(kernels.configs(case), list(case.key), **options)(case.kernel)
        base = kernel_timing.tuned_call(case, alone, data, lambda: None)
        kernels.reset(case, data)
        correct = kernel_timing.check_output(case, data, where, alone.best_config)
        said = {"config": base["winner"], "seconds": round(base["seconds"], 3), "correct": correct}
        print_line({"case": case.name, "base": said})
        trial = _VariantTimer(case, data, where, alone.best_config, base["timings"], given)
        trial.prepare([found[name] for name in given["variants"]])
        with contextlib.closing(trial):
            report_each_source(
                case.name, where, {n: source_mark(found[n]) for n in given["variants"]}, trial.of
            )


class _VariantTimer:
    """The variants of one kernel on its device, compiled ahead in children."""

    def __init__(
        self,
        case: kernels.Case,
        data: kernels.Data,
        where: str,
        best: Any,
        timings: Sequence[Any],
        given: Mapping[str, Any],
    ) -> None:
        self.case, self.data, self.where, self.best = case, data, where, best
        self.fastest = [config for config, _ in timings]
        self.given = given
        self.expected = None if where == "meta" else case.reference(data)
        self.records: dict[str, Variant] = {}
        self.listed: dict[str, list[Candidate]] = {}
        self._call: KernelCall | None = None
        self._measurer: TritonMeasurer | None = None

    def prepare(self, found: Sequence[variant_corpus.VariantSource]) -> None:
        """Choose every variant's configs, and compile all of them in children."""
        self.records = {one.name: one.record() for one in found}
        self._call = call_with_variants(self.case, self.data, list(self.records.values()))
        for name, record in self.records.items():
            own = [c for c in self._call.configs if c.variant == record.name]
            self.listed[name] = self._chosen(own, self.given["order"].get(name, []))
        settings = Settings.from_environment()
        self._measurer = TritonMeasurer(
            self._call,
            "trial",
            workers=settings.worker_count(),
            timeout_s=self.given["limit"] / 2,
            guard=lambda candidate: contextlib.nullcontext(),
            say=lambda candidate: None,
            compiler=settings.compiler,
            patient=False,
        )
        self._measurer.prefetch([c for chosen in self.listed.values() for c in chosen])

    def close(self) -> None:
        """Free what measuring needs."""
        if self._measurer is not None:
            self._measurer.close()

    def _chosen(self, own: Sequence[Candidate], order: Sequence[int]) -> list[Candidate]:
        """The base's fastest configs among a variant's own, then those forecast best, then the first."""
        by_config = {json.dumps(c.config.to_json(), sort_keys=True): c for c in own}
        fast = [by_config[key] for f in self.fastest if (key := json.dumps(f, sort_keys=True)) in by_config]
        likely = [own[i] for i in order if i < len(own)]
        return list(dict.fromkeys([*fast[:TOP], *likely, *own]))[: self.given["configs"]]

    def of(self, name: str) -> dict[str, Any]:
        """Check one variant, time its configs, and its best in turns with the base's."""
        assert self._call is not None
        assert self._measurer is not None
        chosen, record = self.listed[name], self.records[name]
        if self.where != "meta":
            narrow = replace(record, configs=tuple(c.config for c in chosen))
            if wrong := variant_failure(self.case, narrow, self.data, self.expected):
                return {
                    "outcome": "compile_error" if wrong == NEVER_RAN else "incorrect",
                    "detail": wrong[:400],
                }
        kernels.reset(self.case, self.data)
        rows = list(self._measurer.measure(chosen))
        fine = sorted((m for m in rows if m.ok), key=lambda m: m.ms)
        failed = {str(m.candidate.config): str(m.outcome) for m in rows if not m.ok}
        if not fine:
            return {"outcome": str(rows[0].outcome), "failed": failed}
        winner = fine[0].candidate
        base = partial(kernels.launch, self.case, self.data, self.best)
        times = kernel_timing.time_in_turns([base, self._call.launcher(winner), base], self.given["rounds"])
        base_ms, own_ms, again_ms = (statistics.median(t) for t in times)
        wrong = self._wrong(winner)
        return {
            "outcome": "incorrect" if wrong else "ok",
            **({"detail": wrong[:400]} if wrong else {}),
            "config": winner.config.to_json(),
            "ms": round(own_ms, 6),
            "base_ms": round(base_ms, 6),
            "log2_ratio": round(math.log2(own_ms / base_ms), 5),
            "noise": round(abs(again_ms / base_ms - 1), 5),
            "timed": len(fine),
            "failed": failed,
        }

    def _wrong(self, winner: Candidate) -> str:
        """What is wrong with one more launch of the config that counts."""
        if self.where == "meta":
            return ""
        assert self._call is not None
        kernels.reset(self.case, self.data)
        self._call.launcher(winner)()
        devices.synchronize()
        return kernels.mismatch(self.case, self.data, self.expected)


# --- the parent ---


def measure_variants(script: str, a: Namespace) -> int:
    """Measure what is not measured yet, line by line; returns 1 when something is left."""
    found = variant_corpus.variant_sources(a.only.split(",") if a.only else None)
    first = a.forecasts[0]
    forecasts = json.loads(first.read_text(encoding="utf-8")) if first.is_file() else None
    a.out.parent.mkdir(parents=True, exist_ok=True)
    lines = read_lines(a.out)
    done = {(line["case"], line["variant"]) for line in lines if "outcome" in line}
    with a.out.open("a", encoding="utf-8") as out:
        origin = {path.name: file_digest(path) for path in a.forecasts if path.is_file()}
        head = {
            "origin": environment(0),
            "null": a.null,
            "forecasts": origin,
            "variants": file_digest(variant_corpus.TABLE),
        }
        append_line(out, head)
        begin, empty, left = time.perf_counter(), 0, 0
        for kernel in sorted({one.kernel for one in found}):
            (case,) = first_cases_of(kernel, 1)
            names = [o.name for o in found if o.kernel == kernel and (case.name, o.name) not in done]
            if not names:
                continue
            if time.perf_counter() - begin > a.seconds or empty >= MOST_SILENT_KERNELS:
                left += len(names)
                continue
            given = {
                "case": case.name,
                "order": _forecast_orders(forecasts, case.name),
                "configs": a.configs,
                "rounds": 5 if a.null else a.rounds,
                "limit": a.limit,
            }
            made = run_in_children(script, a, out, "measure", names, given)
            left += len(names) - made
            empty = empty + 1 if made == 0 else 0
            say(f"{case.name}: {made} of {len(names)} variants, {time.perf_counter() - begin:.0f} s so far")
            if empty >= MOST_SILENT_KERNELS:
                say(f"{empty} kernels in a row gave nothing: something else is wrong, so nothing is started")
    say(f"{left} variants are left" if left else "all variants are measured")
    return int(left > 0)


def _forecast_orders(forecasts: Mapping[str, Any] | None, case: str) -> dict[str, list[int]]:
    """Places of the most promising configs by variant, as they were forecast."""
    for row in forecasts["raw"]["cases"] if forecasts is not None else ():
        if row["case"] == case:
            return {v: [int(i) for i in f["order"].split()] for v, f in row["forecasts"]["learned"].items()}
    return {}
