"""One lane of a harvest: the process of one GPU, which times kernels that are compiled already.

`harvest_kernels.py` starts it, and gives it kernels by name on its standard input.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import kernels
from forecast_autotune import autotune
from forecast_autotune.features.cost import NUMERIC_FACTS
from forecast_autotune.features.cost import VERSION as COST
from forecast_autotune.features.ttir.extraction import assignment_of, extract_facts
from forecast_autotune.printable import utc_now
from forecast_autotune.records import Candidate, Measurement, Outcome, digest
from forecast_autotune.records.table import Table, table_lines
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_integrations.triton.null_device import null_device
from forecast_integrations.triton.problem import describe

COMPILE_TIMEOUT_S = 15.0
"""A compilation that takes longer is given up; that config is a label of its own."""


EACH_VARIABLE, AFTER_VARIABLE, SHAPES_VARIABLE = ("HARVEST_EACH", "HARVEST_AFTER", "HARVEST_SHAPES")
"""Variables that thin a harvest: the most configs of a case, how many of those an earlier one has timed, and the
most cases of a kernel."""


def harvested_configs(case: kernels.Case) -> list[Any]:
    """The configs of a case that this harvest times."""
    return kernels.thinned(
        case, int(os.environ.get(EACH_VARIABLE, 1_000_000)), int(os.environ.get(AFTER_VARIABLE, 0))
    )


def harvested_cases(kernel: str) -> list[kernels.Case]:
    """The cases of a kernel that this harvest times, in their order."""
    every = kernels.cases([kernel])
    chosen = sorted(every, key=lambda c: digest("thinned", c.name))[
        : int(os.environ.get(SHAPES_VARIABLE, 1_000_000))
    ]
    return [c for c in every if c in chosen]


@dataclass
class HarvestWorker:
    """One lane process: where it writes, and how."""

    stores: Path
    """One store per kernel: reading it back must not take longer as the harvest grows."""
    table: Path
    null: bool

    def kernel(self, name: str, hung: dict[str, list[int]]) -> None:
        """Time all configs of all shapes of one kernel, and append its tables to the lane's file."""
        rows: dict[str, kernels.Case] = {}
        tuners: dict[str, Any] = {}
        store = Store(self.stores / name)
        for case in harvested_cases(name):
            skipped = set(hung.get(case.name, []))
            configs = [c for i, c in enumerate(harvested_configs(case)) if i not in skipped]
            if len(configs) < 2:
                continue  # a single config is launched, not timed
            # One tuner for all shapes with this list: it knows what is compiled and traced already.
            mark = f"{id(case.kernel)} {case.key} {[str(c) for c in configs]}"
            if mark not in tuners:
                tuners[mark] = autotune(
                    configs=configs,
                    key=list(case.key),
                    reset_to_zero=list(case.reset_to_zero),
                    store=store,
                    mode="exhaustive",
                )(case.kernel)
            row = self._case(case, tuners[mark])
            print(json.dumps(row), flush=True)
            if "problem" in row:
                rows[row["problem"]] = case
        tables = [
            _labelled_table(t, rows[t.problem.id], hung) for t in store.tables() if t.problem.id in rows
        ]
        # A gzip file may have many members: appending one leaves the others whole.
        with self.table.open("ab") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
            packed.writelines(line.encode() for line in table_lines(tables))

    def _case(self, case: kernels.Case, tuner: Any) -> dict[str, Any]:
        begin = time.perf_counter()
        try:
            inputs = case.make("meta" if self.null else "cuda")
            tuner.cache.clear()
            kernels.reset(case, inputs)
            tuner[inputs["grid"]](*inputs["args"], **inputs["kwargs"])
            wrong = "" if self.null else kernels.mismatch(case, inputs)
        except torch.AcceleratorError:
            raise  # the device context is gone: this lane has to end
        except Exception as error:
            return {"case": case.name, "failed": f"{type(error).__name__}: {error}"[:600]}
        finally:
            inputs = {}
        if wrong:
            return {"case": case.name, "failed": f"wrong result with {tuner.best_config}: {wrong}"}
        decision = tuner.decision
        times = [t[0] for t in tuner.configs_timings.values()]
        ran = sorted(t for t in times if t != float("inf"))
        return {
            "case": case.name,
            "problem": decision.problem,
            "configs": len(times),
            "ok": len(ran),
            "best_ms": ran[0],
            "median_ms": ran[len(ran) // 2],
            "chosen": str(decision.chosen),
            "seconds": round(time.perf_counter() - begin, 2),
            "timing_s": round(decision.cost.timing_s, 2),
        }


def _labelled_table(table: Table, case: kernels.Case, hung: dict[str, list[int]]) -> Table:
    """A table named after its case, rows in the order of the case's config list, hung configs added.

    They were measured best forecast first; a baseline that takes "the first k" must not see that.
    """
    every = [Candidate(describe.to_config(c)) for c in harvested_configs(case)]
    place = {candidate: i for i, candidate in enumerate(every)}
    known = {m.candidate for m in table.measurements}
    missing = [
        Measurement(
            table.problem.id,
            every[i],
            Outcome.TIMEOUT,
            compile_s=COMPILE_TIMEOUT_S,
            at=utc_now(),
            extra={"message": f"not compiled after {COMPILE_TIMEOUT_S:g} s"},
        )
        for i in hung.get(case.name, [])
        if every[i] not in known
    ]
    rows = sorted([*table.measurements, *missing], key=lambda m: (place[m.candidate], m.at))
    noted = {
        "label": case.name,
        "family": case.family,
        "hand": case.hand,
        "compiled_at_once": Settings.from_environment().worker_count(),
    }
    noted["facts"] = table_facts(table)
    return Table(replace(table.problem, extra={**table.problem.extra, **noted}), rows)


def table_facts(table: Table) -> dict[str, Any]:
    """Return what the extractor reads of each TTIR and launch grid, so that a refit need not parse any IR.

    `rows` maps `<assignment> <grid>` to the numbers of `names`; the dots' shapes are not among them.
    """
    problem, rows = table.problem, {}
    for candidate, m in table.by_candidate().items():
        grid = m.grid or problem.grid
        text = problem.ttir.get(assignment_of(candidate))
        mark = f"{assignment_of(candidate)} {list(grid or ())}"
        if text is not None and mark not in rows:
            read = extract_facts(text, problem.arguments, grid)
            rows[mark] = [round(float(getattr(read, name)), 3) for name in NUMERIC_FACTS]
    return {"version": COST, "names": list(NUMERIC_FACTS), "rows": rows}


def run_worker(store: Path, table: Path, null: bool) -> int:
    """The process of one GPU: a JSON line `{"kernel", "hung"}` per kernel in, results out."""
    if null:
        with null_device():
            return _serve_kernel(HarvestWorker(store, table, null))
    return _serve_kernel(HarvestWorker(store, table, null))


def _serve_kernel(one: HarvestWorker) -> int:
    print(json.dumps({"ready": torch.cuda.is_available()}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        one.kernel(order["kernel"], order["hung"])
        print(json.dumps({"done": order["kernel"]}), flush=True)
    return 0
