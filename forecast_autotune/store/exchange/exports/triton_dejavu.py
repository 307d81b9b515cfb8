"""triton-dejavu's cache of best configs: one `cache.json` per kernel and device, keys and configs as text.

triton-dejavu keeps each file in folders named by hashes of the function, its config list and its options, which
only a process that has loaded the kernel can compute: the files go where its tool for merging caches takes them
from, or over the `cache.json` that a first run of the decorated kernel leaves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forecast_autotune.store.exchange.exports.tuned_problem import ExportReport, TunedProblem, triton_text


def write_triton_dejavu(folder: Path, problems: Sequence[TunedProblem]) -> ExportReport:
    """Write `<gpu>/<kernel>/cache.json` files into a folder. Raises `OSError`."""
    report = ExportReport()
    files: dict[Path, list[TunedProblem]] = defaultdict(list)
    for tuned in problems:
        if tuned.chosen is None:
            report.left_out.append(f"{tuned.problem.kernel.name} {' '.join(tuned.problem.key)}: nothing ran")
            continue
        gpu = f"gpu_{tuned.problem.device.name.replace(' ', '_')}"
        name = "".join(c if c.isalnum() or c == "_" else "_" for c in tuned.problem.kernel.name)
        files[folder / gpu / name / "cache.json"].append(tuned)
    for path, every in files.items():
        first = every[0].problem
        data: dict[str, Any] = {
            "signature": f"JITFunction({first.kernel.extra.get('module', '')}:{first.kernel.name})",
            "total_bench_time_s": sum(t.decision.cost.wall_s for t in every if t.decision),
            "evaluated_configs": max(len(t.rows) for t in every),
            "keys": None,
            "cache": {},
            "timings": {},
            "timings_data": {
                "labels": ["ms", "min_ms", "max_ms"],
                "rep_t_ms": None,
                "warmup_t_ms": None,
                "cuda_graphs": False,
            },
        }
        for tuned in every:
            assert tuned.chosen is not None
            key = str(tuned.problem.key)  # of words alone, numbers too, as triton-dejavu keeps them
            data["cache"][key] = triton_text(tuned.chosen.config)
            row = tuned.rows.get(tuned.chosen)
            if row is not None and row.ok:
                data["timings"][key] = [row.ms, row.p20_ms or row.ms, row.p80_ms or row.ms]
            report.problems += 1
            report.measurements += len(tuned.rows)
        report.write(path, data)
    return report
