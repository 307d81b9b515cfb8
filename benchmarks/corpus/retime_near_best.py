"""Configs that came close to the best, timed again in turns: the best one, and how far two timings differ.

    python -m benchmarks.corpus.harvest_kernels --out MEASURED --near TABLE [TABLE ...] --within 0.12
    python -m benchmarks.corpus.retime_near_best TABLE [TABLE ...] --measured MEASURED \
        --table NEAR.jsonl.gz --out RESULT.json

A harvest times each config by itself, and the fastest four in turns. The luckiest of many configs within noise of
each other looks best then, and any other choice is charged for its luck. The second run times all of
a problem's close configs in turns; here its times are brought to the level of the first (another machine's
events may take a microsecond longer: the median difference of a problem is taken off) and written as a table
that is to be read after the others, whose last word counts. The result tells by length of the best what the
level was, and how far the two timings of a config differ beyond it.
"""

from __future__ import annotations

import gzip
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median, pstdev, quantiles
from typing import Any

from benchmarks.lib import result_files
from forecast_autotune.records import Measurement
from forecast_autotune.records.table import Table, table_lines
from forecast_autotune.tuning.replays.replay import load

LENGTHS_US = (10, 20, 50, 200, math.inf)
"""Upper ends of the lengths that are told apart."""


def close_configs(paths: Iterable[Path], within: float) -> dict[str, list[str]]:
    """By case, the configs recorded within a share of its fastest: what noise may have ranked.

    Cases with one such config are left out.
    """
    result = {}
    for table in load(paths):
        ran = {c: m.ms for c, m in table.by_candidate().items() if m.ok}
        close = [str(c.config) for c, ms in ran.items() if ms <= (1 + within) * min(ran.values())]
        if len(close) > 1:
            result[problem_label(table)] = close
    return result


def problem_label(table: Table) -> str:
    """Return what a problem is called, whatever its id."""
    return str(table.problem.extra["label"])


def measurement_pairs(old: Table, new: Table) -> list[tuple[Measurement, Measurement]]:
    """Both measurements of each candidate that ran both times."""
    before = old.by_candidate()
    return [(before[c], m) for c, m in new.by_candidate().items() if m.ok and c in before and before[c].ok]


def levelled_measurements(old: Table, new: Table) -> Table:
    """The new measurements of what ran both times, at the level of the old: less the median difference.

    The problem is the old one without the IR, which the old table has.
    """
    both = measurement_pairs(old, new)
    level = median(m.ms - b.ms for b, m in both) if both else 0.0
    # A device cannot be faster than its events: nothing falls below half of what was measured.
    level = min(level, min((m.p20_ms or m.ms) for _, m in both) / 2) if both else 0.0
    extra = {name: value for name, value in old.problem.extra.items() if name != "facts"}
    rows = [
        replace(
            m,
            problem=old.problem.id,
            median_ms=m.ms - level,
            p20_ms=None if m.p20_ms is None else m.p20_ms - level,
            p80_ms=None if m.p80_ms is None else m.p80_ms - level,
            extra={},
        )
        for _, m in both
    ]
    return Table(replace(old.problem, ttir={}, extra=extra), rows)


def timing_differences(tables: Sequence[tuple[Table, Table]]) -> list[dict[str, Any]]:
    """By length of the best: the level, and how far two timings of a config differ beyond it, as shares."""
    kept: dict[float, list[tuple[float, list[float]]]] = {}
    for old, new in tables:
        both = measurement_pairs(old, new)
        if len(both) < 2:
            continue
        level = median(m.ms - b.ms for b, m in both)
        length = next(us for us in LENGTHS_US if min(b.ms for b, _ in both) * 1e3 < us)
        off = [(m.ms - level) / b.ms - 1 for b, m in both]
        kept.setdefault(length, []).append((level, off))
    rows = []
    for us, result in sorted(kept.items()):
        off = [x for _, each in result for x in each]
        rows.append(
            {
                "best_us_below": None if math.isinf(us) else us,
                "problems": len(result),
                "configs": len(off),
                "median_level_us": round(median(level for level, _ in result) * 1e3, 3),
                "sd": round(pstdev(off), 5),
                "median": round(median(map(abs, off)), 5),
                "p95": round(quantiles(map(abs, off), n=20)[-1], 5),
            }
        )
    return rows


def lucky_choice_regret(tables: Sequence[tuple[Table, Table]]) -> float:
    """Geometric-mean regret, by the joined times, of the config that the old times alone call best."""
    lost = []
    for old, new in tables:
        before = {c: m.ms for c, m in old.by_candidate().items() if m.ok}
        after = {**before, **{m.candidate: m.ms for m in new.measurements}}
        lost.append(math.log(after[min(before, key=before.__getitem__)] / min(after.values())))
    return math.exp(fmean(lost)) - 1


def main() -> int:
    parser = result_files.parser(__doc__)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--measured", type=Path, required=True, help="folder of `harvest_kernels.py --near`")
    parser.add_argument("--table", type=Path, required=True)
    parser.set_defaults(stub_only=True)
    a = result_files.parse_arguments(parser)
    report = result_files.ResultFile(a, "near")
    old = {problem_label(t): t for t in load(a.tables)}
    new = sorted(load(sorted(a.measured.glob("tables-*.jsonl.gz"))), key=problem_label)
    joined = [(old[problem_label(t)], levelled_measurements(old[problem_label(t)], t)) for t in new]
    written = [t for _, t in joined if len(t.measurements) > 1]
    with a.table.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
        packed.writelines(line.encode() for line in table_lines(written))
    result = {
        "problems": len(written),
        "configs": sum(len(t.measurements) for t in written),
        "noise": timing_differences([(old[problem_label(t)], t) for t in new]),
        "regret_of_the_old_best": round(lucky_choice_regret(joined), 5),
    }
    report.finish(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
