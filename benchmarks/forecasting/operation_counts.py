"""Claim: what the feature extractor counts without compiling is what the kernels do.

    python -m benchmarks.forecasting.operation_counts --out benchmarks/results/count_checks.json

Traces three configs of the first and the last shape of every benchmark kernel, without a GPU, and compares
the counted FLOPs and bytes of the whole launch with formulas worked out by hand (`hand_counted_traffic.py`)
where there is one, and with the case's useful work everywhere. Useful work is less than what is done
by masked lanes, by tiles that several programs load and by what is computed again; that ratio is
reported, not judged. Exits with 1 if a formula is missed by more than 1 %, or a kernel cannot be read.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import kernels
from benchmarks.lib.case_problems import problem_of_case
from benchmarks.lib.hand_counted_traffic import HAND_COUNTS, CountedLaunch
from benchmarks.lib.result_files import ResultFile, say
from forecast_autotune.features.trace import trace_many
from forecast_autotune.features.ttir.extraction import FeatureError, TtirFacts, assignment_of, extract_facts
from forecast_autotune.records import Candidate
from forecast_integrations.triton.null_device import null_device
from forecast_integrations.triton.problem import describe

TOLERANCE = 0.01
# Eight programs stand for a grid: of a grid whose last few programs find no work left, none may be idle.
_CASE_TOLERANCES = {"bp_streamk_matmul": 0.04}
_PLACES = (0.5, 0.2, 0.8)
"""Where in its list of distinct assignments a case's configs are taken from."""


def sampled_configs(case: kernels.Case) -> list[Any]:
    """Configs that differ in their meta-parameters: one from the middle of the list and two from its ends."""
    distinct: dict[str, Any] = {}
    for config in kernels.configs(case):
        distinct.setdefault(json.dumps(config.kwargs, sort_keys=True), config)
    every = list(distinct.values())
    places = dict.fromkeys(min(len(every) - 1, int(share * len(every))) for share in _PLACES)
    return [every[place] for place in places]


def odd_counts(case: kernels.Case, read: TtirFacts) -> list[str]:
    """What no kernel should look like."""
    found = []
    if not read.load_bytes:
        found.append("loads nothing")
    if not read.store_bytes and not read.atomic_elements:
        found.append("stores nothing")
    reduced = read.reduce_elements + read.scan_elements
    if case.flops and not (read.dot_flops + read.elementwise + read.special + reduced):
        found.append("computes nothing")
    if read.unknown_trips:
        found.append(f"{read.unknown_trips} loops with assumed trips")
    return found


def check_case(case: kernels.Case) -> Iterator[dict[str, Any]]:
    """A row per config of one case."""
    kernel = case.name.partition("/")[0]
    (problem, named), data = problem_of_case(case), case.make("meta")
    configs = {Candidate(describe.to_config(config)): config for config in sampled_configs(case)}
    grids = describe.launch_grids(configs, data["grid"], named, case.kernel)
    assignments = [dict(config.kwargs) for config in configs.values()]
    traced = trace_many(case.kernel, data["args"], data["kwargs"], assignments)
    for (candidate, config), (_, text) in zip(configs.items(), traced, strict=True):
        row: dict[str, Any] = {"case": case.name, "family": case.family, "hand": case.hand}
        row["config"] = assignment_of(candidate)
        grid = grids.get(candidate)
        try:
            if isinstance(text, FeatureError):
                raise text
            read = extract_facts(text, problem.arguments, grid)
        except FeatureError as error:
            yield {**row, "error": str(error)}
            continue
        programs = math.prod(grid) if grid else 1
        moved = read.load_bytes + read.store_bytes + 4.0 * read.atomic_elements
        row["grid"], row["masked_share"] = grid, round(read.masked_share, 4)
        row["oddities"] = odd_counts(case, read)
        row["bytes_to_useful"] = round(moved * programs / case.bytes, 3) if case.bytes else None
        useful = read.dot_flops and case.flops
        row["flops_to_useful"] = round(read.dot_flops * programs / case.flops, 3) if useful else None
        if kernel in HAND_COUNTS and grid:
            expected = HAND_COUNTS[kernel](CountedLaunch({**named, **config.kwargs}, tuple(grid)))
            counted = {name: getattr(read, name) * programs for name in expected}
            row["by_hand"], row["counted"] = expected, counted
            row["deviation"] = max(_relative_deviation(counted[n], expected[n]) for n in expected)
        yield row


def _relative_deviation(counted: float, expected: float) -> float:
    return abs(counted / expected - 1) if expected else float(counted != 0)


def table(rows: list[dict[str, Any]]) -> str:
    """The configs with a formula, as Markdown."""
    lines = ["| kernel | config | what | counted | by hand | deviation |", "|---|---|---|---:|---:|---:|"]
    for row in rows:
        if "by_hand" not in row:
            continue
        for name, expected in row["by_hand"].items():
            if expected:
                counted = row["counted"][name]
                share = f"{_relative_deviation(counted, expected):.2%}"
                lines.append(
                    f"| {row['case']} | {row['config']} | {name} | {counted:.5g} | {expected:.5g} | {share} |"
                )
    return "\n".join(lines)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts and extremes over all rows."""
    names = sorted({row["case"].partition("/")[0] for row in rows})
    by_hand = [row for row in rows if "by_hand" in row]
    odd: dict[str, set[str]] = {}
    for row in rows:
        for oddity in row.get("oddities", []):
            odd.setdefault(oddity.lstrip("0123456789 "), set()).add(row["case"].partition("/")[0])
    ratios = [row["flops_to_useful"] for row in rows if row.get("flops_to_useful") is not None]
    return {
        "kernels": len(names),
        "configs": len(rows),
        "unreadable": [f"{row['case']}: {row['error']}" for row in rows if "error" in row],
        "kernels_by_hand": len({row["case"].partition("/")[0] for row in by_hand}),
        "families_by_hand": len({row["family"] for row in by_hand}),
        "configs_by_hand": len(by_hand),
        "worst_deviation": max((row["deviation"] for row in by_hand), default=None),
        "configs_within_0.01_percent": sum(row["deviation"] < 1e-4 for row in by_hand),
        "beyond_tolerance": [
            row["case"]
            for row in by_hand
            if row["deviation"] > _CASE_TOLERANCES.get(row["case"].partition("/")[0], TOLERANCE)
        ],
        "oddities": {name: sorted(found) for name, found in sorted(odd.items())},
        "dot_flops_below_useful": sum(ratio < 1 - TOLERANCE for ratio in ratios),
        "dot_flops_compared": len(ratios),
    }


def main() -> int:
    """Run the checks; returns the process's exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    report = ResultFile(arguments, "count_checks")
    first: dict[str, list[kernels.Case]] = {}
    for case in kernels.every():
        first.setdefault(case.name.partition("/")[0], []).append(case)
    rows: list[dict[str, Any]] = []
    with null_device():
        for shapes in first.values():
            for name in dict.fromkeys((shapes[0].name, shapes[-1].name)):
                rows += check_case(next(c for c in shapes if c.name == name))
    print(table(rows))
    report.data["raw"]["rows"] = rows
    found = summary(rows)
    report.finish(found)
    say(f"{len(rows)} configs of {found['kernels']} kernels")
    return 1 if found["beyond_tolerance"] or found["unreadable"] else 0


if __name__ == "__main__":
    sys.exit(main())
