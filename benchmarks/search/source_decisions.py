"""Claim: among a kernel's configs and those of its rewrites, the default decision finds what beats it.

    python -m benchmarks.search.source_decisions benchmarks/data/search_sources_h200*.jsonl.gz --models FOLDER \
        --out FILE [--seeds 5] [--origins mechanical llm]

Replays the tuner with its default policy on tables of sources and configs that were all timed (see
`sources_and_configs`), forecast by a surrogate that was fitted without the kernel's family: once with the base's
own configs, and with those of all right sources of one origin beside them: at once, and `later`, when the
base has been decided. `over_best` is the time of the base under the best of all its recorded configs over
that of what was chosen, more than 1 where the choice is faster. A kernel counts where the median of its seeds
gains 3 % or more. Checking a source is not in it: each was checked when it was recorded.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from benchmarks.lib.search.source_pool import BASE
from benchmarks.lib.surrogates_without import surrogates_by_family
from benchmarks.lib.variants.variant_forecasts import file_digest
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_autotune.tuning.replays.replay import ReplayStore, load, replay_one

WORTHWHILE_SPEEDUP = 1.03
TOLERANCE = Settings().tolerance


def with_origin(table: Table, origin: str) -> Table:
    """The base and all right sources of an origin; of none where `origin` is empty."""
    told = table.problem.extra["sources"]
    kept = {n for n, one in told.items() if one["origin"] == origin and one.get("outcome") == "ok"} | {BASE}
    return Table(table.problem, [m for m in table.measurements if m.candidate.variant in kept])


def has_origin(table: Table, origin: str) -> bool:
    """Whether a right source of that origin was recorded to its end, and the base ran."""
    base = with_origin(table, "")
    return (
        len(with_origin(table, origin).measurements) > len(base.measurements) and fastest_ms(base) < math.inf
    )


def fastest_ms(table: Table) -> float:
    """Milliseconds of the best candidate; infinite where none ran."""
    return min((m.ms for m in table.by_candidate().values() if m.ok), default=math.inf)


def decisions(
    table: Table, origin: str, surrogate: Surrogate, seeds: int, *, later: bool = False
) -> dict[str, Any]:
    """What the default decision comes to, by seed, against the base under its best config.

    `later`: the other sources come when the base has been decided, by a store that knows what that measured.
    """
    part, base = with_origin(table, origin), with_origin(table, "")
    possible = fastest_ms(base) / fastest_ms(part)
    gains, measured = [], []
    for seed in range(seeds):
        settings, store = Settings(mode=Mode.TUNE).with_(seed=seed), ReplayStore(())
        for each in (base, part) if later else (part,):
            decision, _ = replay_one(each, surrogate=surrogate, policy=None, settings=settings, store=store)
        gains.append(round(possible / (1.0 + decision.regret), 4))
        measured.append(decision.measured)
    return {
        "candidates": len(part.by_candidate()),
        "possible": round(possible, 4),
        "later": later,
        "over_best": gains,
        "measured": measured,
    }


def summary(rows: Sequence[dict[str, Any]], origins: Sequence[str]) -> dict[str, Any]:
    """How many kernels gain, by origin, and what all of them gain on average."""
    found: dict[str, Any] = {}
    for origin, later in itertools.product(origins, (False, True)):
        mine = [r for r in rows if r["origin"] == origin and r["later"] == later]
        if not mine:
            continue
        medians = [statistics.median(r["over_best"]) for r in mine]
        beyond = [r["possible"] / g - 1.0 > TOLERANCE for r in mine for g in r["over_best"]]
        found[f"{origin or BASE}{', later' if later else ''}"] = {
            "kernels": len(mine),
            "gain": sum(m >= WORTHWHILE_SPEEDUP for m in medians),
            "could_gain": sum(r["possible"] >= WORTHWHILE_SPEEDUP for r in mine),
            "geometric_mean": round(statistics.geometric_mean(medians), 4),
            "of_possible": round(statistics.geometric_mean([r["possible"] for r in mine]), 4),
            "beyond_tolerance": round(statistics.fmean(beyond), 3),
            "median_measured": statistics.median(n for r in mine for n in r["measured"]),
            "most_measured": max(n for r in mine for n in r["measured"]),
        }
    return found


def main() -> int:
    made = parser(__doc__)
    made.add_argument("tables", type=Path, nargs="+")
    made.add_argument("--models", type=Path, required=True, help="folder of surrogates, see search_sources")
    made.add_argument("--origins", nargs="+", default=["mechanical", "llm"])
    made.add_argument("--seeds", type=int, default=5)
    made.set_defaults(stub_only=True)
    a = parse_arguments(made)
    report = ResultFile(a, "the default decision finds faster sources", seed=a.seeds)
    tables = [t for t in load(a.tables) if any(has_origin(t, origin) for origin in a.origins)]
    known = surrogates_by_family(sorted({t.problem.extra["family"] for t in tables}), a.models)
    rows = []
    for table in tables:
        about = {"problem": table.problem.extra["label"], "family": table.problem.extra["family"]}
        for origin in ("", *a.origins):
            if origin and not has_origin(table, origin):
                continue
            for later in (False, True) if origin else (False,):
                found = decisions(table, origin, known[about["family"]], a.seeds, later=later)
                row = {**about, "origin": origin, **found}
                rows.append(row)
                report.add("decisions", row)
                when = f"{origin or BASE}{', later' if later else ''}"
                say(f"{about['problem']}, {when}: {row['over_best']} of {row['possible']}")
    report.finish({"tables": [file_digest(path) for path in a.tables], **summary(rows, ("", *a.origins))})
    return 0


if __name__ == "__main__":
    sys.exit(main())
