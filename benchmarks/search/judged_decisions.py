"""Claim: blind judgements of sources find the best of a kernel's sources and configs with fewer measurements.

    python -m benchmarks.search.judged_decisions --models FOLDER --out benchmarks/results/judged_decisions.json
        [--seeds 3] [--every 1]

No GPU: replays the tuner with its default policy on `data/sources_h200.jsonl.gz`, in which the base and other right
sources of a kernel were timed under several configs each, forecast by a surrogate that has not seen the kernel's
family: without judgements, and with those of `data/source_answers.jsonl.gz`, which were given blind. How far these
are followed (`JudgementWeights`) is fitted without the family, too; `as if known` replaces them by what the sources
came to, the most that any judgement could be worth. Regret is against the best candidate of the table, after so many
measurements and as decided; intervals are 95 % over kernels, of differences on the same problems and seeds.
`equal_risk` is how many measurements as many misses take.
"""

from __future__ import annotations

import math
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.advice.figures import equal_risk, interval
from benchmarks.lib.environment import ROOT
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from benchmarks.lib.search.source_pool import BASE
from benchmarks.lib.surrogates_without import surrogates_by_family
from benchmarks.lib.variants.judgement_weights import (
    base_ran,
    fit_weights,
    judged_differences,
    judged_part,
)
from benchmarks.lib.variants.source_answers import ANSWERS, read_answers
from benchmarks.lib.variants.variant_forecasts import file_digest
from forecast_autotune.records.table import Table, read_tables
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.judged_sources import (
    VERSION,
    JudgementWeights,
    judged_forecasts,
)
from forecast_autotune.surrogates.protocol import Forecasts, Query, Surrogate
from forecast_autotune.tuning.replays.replay import ReplayStore, replay_one
from forecast_autotune.variants.judgement import SourceJudgement
from forecast_train.surrogate.replay_observation import observe_replay

Figure = Callable[[Mapping[str, Any]], float]
"""A number of one decision."""

TABLE = ROOT / "benchmarks" / "data" / "sources_h200.jsonl.gz"
WITHOUT, JUDGED, KNOWN = "without", "judged", "as if known"
ARMS = (WITHOUT, JUDGED, KNOWN)
AFTER = (3, 5, 9, 15)
"""Numbers of measurements after which regret is looked at."""
KNOWN_WEIGHTS = JudgementWeights(learned=0.0, judged=1.0, disagreement=0.02, common=0.02)
KNOWN_SD = 0.02
TOLERANCE = Settings().tolerance


class FollowingJudgements:
    """A surrogate that is told judgements of a table's sources with every question."""

    name, version = "judged", VERSION

    def __init__(
        self, base: AnalyticSurrogate, judgements: Mapping[str, SourceJudgement], weights: JudgementWeights
    ) -> None:
        self.base, self.judgements, self.weights = base, dict(judgements), weights

    def forecast(self, query: Query) -> Forecasts:
        """Forecast all candidates of the query."""
        return judged_forecasts(self.base, replace(query, judgements=self.judgements), self.weights)


def known_judgements(table: Table, told: Mapping[str, SourceJudgement]) -> dict[str, SourceJudgement]:
    """What each judged source came to in the table; those that never ran are as they were judged."""
    best: dict[str, float] = {}
    for m in table.by_candidate().values():
        if m.ok:
            best[m.candidate.variant] = min(math.log2(m.ms), best.get(m.candidate.variant, math.inf))
    return {
        name: SourceJudgement(best[name] - best[BASE], KNOWN_SD) if name in best else one
        for name, one in told.items()
    }


def decide(table: Table, surrogate: Surrogate, seed: int) -> dict[str, Any]:
    """What the default decision comes to."""
    settings = Settings(mode=Mode.TUNE).with_(seed=seed)
    row, _ = replay_one(table, surrogate=surrogate, policy=None, settings=settings, store=ReplayStore(()))
    path = [min(9.0, x) for x in row.path]
    return {
        "seed": seed,
        "measured": row.measured,
        "candidates": row.candidates,
        "regret": round(row.regret, 6),
        "stated_risk": round(row.stated_risk, 4),
        "seconds": round(row.tune_s - row.forecast_s, 4),
        **{f"after_{n}": round(path[min(n, len(path)) - 1], 6) for n in AFTER},
    }


def observed_steps(table: Table, surrogate: Surrogate) -> list[list[float]]:
    """[own, measured, stated risk before calibration, missed] at each step of a replay."""
    steps, _ = observe_replay(table, surrogate, seed=0, relatives=[])
    return [[s.own, s.new, s.risk, float(s.beaten is not False)] for s in steps if s.new]


def summary(rows: Sequence[Mapping[str, Any]], replays: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By arm: means over kernels, and differences to the arm without judgements."""
    found: dict[str, Any] = {}
    regrets = ("regret", *(f"after_{n}" for n in AFTER))
    for arm in dict.fromkeys(r["arm"] for r in rows):
        mine = [r for r in rows if r["arm"] == arm]
        shown: dict[str, Any] = {
            "problems": len({r["problem"] for r in mine}),
            "kernels": len({r["kernel"] for r in mine}),
            "measured": round(statistics.fmean(_means(mine, lambda r: r["measured"])), 3),
            "share": round(statistics.fmean(_means(mine, _share)), 4),
            "beyond_tolerance": round(statistics.fmean(_means(mine, _missed)), 4),
            "stated_risk": round(statistics.fmean(_means(mine, lambda r: r["stated_risk"])), 4),
        }
        for name in regrets:
            logs = _means(mine, _log_regret(name))
            shown[name] = round(math.expm1(statistics.fmean(logs)), 5)
        if arm != WITHOUT:
            rivals = [r for r in rows if r["arm"] == WITHOUT]
            figures: dict[str, Figure] = {name: _log_regret(name) for name in regrets}
            figures |= {"share": _share, "beyond_tolerance": _missed}
            shown["differences"] = {
                name: interval(np.array(_means(mine, of)) - np.array(_means(rivals, of)))
                for name, of in figures.items()
            }
        found[arm] = shown
    named = {WITHOUT: "learned", JUDGED: "advice"}
    some = [{**r, "arm": named[r["arm"]]} for r in replays if r["arm"] in named]
    if some:
        told = equal_risk(some)
        found["equal_risk"] = {
            "missed": told["missed"],
            "measured_without": told["measured_learned"],
            "measured_judged": told["measured_advice"],
            "saving": told["saving"],
        }
    return found


def _log_regret(name: str) -> Figure:
    return lambda row: math.log1p(row[name])


def _share(row: Mapping[str, Any]) -> float:
    return float(row["measured"] / row["candidates"])


def _missed(row: Mapping[str, Any]) -> float:
    return float(row["regret"] > TOLERANCE)


def _means(rows: Sequence[Mapping[str, Any]], of: Figure) -> list[float]:
    """One mean per kernel, in the order of their names."""
    by: dict[str, list[float]] = {}
    for row in rows:
        by.setdefault(row["kernel"], []).append(float(of(row)))
    return [statistics.fmean(by[kernel]) for kernel in sorted(by)]


def replay_all(a: Namespace, report: ResultFile) -> dict[str, Any]:
    """Everything; the summary."""
    about, answers = read_answers(a.answers)
    tables = [judged_part(t, answers) for t in read_tables(a.table)]
    parts = [(t, told) for t, told in tables if told and base_ran(t)][:: a.every]
    families = sorted({t.problem.extra["family"] for t, _ in parts})
    surrogates = surrogates_by_family(families, a.models)
    differences = []
    for table, told in parts:
        known = surrogates[table.problem.extra["family"]]
        assert isinstance(known, AnalyticSurrogate)
        differences += judged_differences(table, told, known)
    say(f"{len(differences)} sources at {len(parts)} problems")
    weights = {f: fit_weights([d for d in differences if d.family != f]) for f in families}
    rows: list[dict[str, Any]] = []
    replays: list[dict[str, Any]] = []
    for number, (table, told) in enumerate(parts):
        extra = table.problem.extra
        plain = surrogates[extra["family"]]
        assert isinstance(plain, AnalyticSurrogate)
        about_it = {
            "problem": table.problem.id,
            "kernel": extra["label"].partition("/")[0],
            "family": extra["family"],
        }
        arms: dict[str, Surrogate] = {
            WITHOUT: plain,
            JUDGED: FollowingJudgements(plain, told, weights[extra["family"]]),
            KNOWN: FollowingJudgements(plain, known_judgements(table, told), KNOWN_WEIGHTS),
        }
        for arm, surrogate in arms.items():
            rows += [{**about_it, "arm": arm, **decide(table, surrogate, s)} for s in range(a.seeds)]
            if arm != KNOWN:
                count = len(table.by_candidate())
                steps = observed_steps(table, surrogate)
                replays.append({**about_it, "arm": arm, "candidates": count, "steps": steps})
        if number % 50 == 49:
            say(f"{number + 1} of {len(parts)} problems")
    report.data["raw"]["decisions"] = rows
    every = [d.measured for d in differences]
    return {
        "table": file_digest(a.table),
        "answers": {**about, "sha256": file_digest(a.answers)},
        "sources": len(every),
        "weights": {f: {k: round(v, 4) for k, v in vars(w).items()} for f, w in weights.items()},
        "all_weights": {k: round(v, 4) for k, v in vars(fit_weights(differences)).items()},
        **summary(rows, replays),
    }


def main() -> int:
    made = parser(__doc__)
    made.add_argument(
        "--models", type=Path, required=True, help="folder of surrogates, a family left out each"
    )
    made.add_argument("--table", type=Path, default=TABLE)
    made.add_argument("--answers", type=Path, default=ANSWERS)
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--every", type=int, default=1, help="each so manieth problem alone")
    made.set_defaults(stub_only=True)
    a = parse_arguments(made)
    report = ResultFile(a, "judgements of sources in decisions over sources and configs", seed=a.seeds)
    report.finish(replay_all(a, report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
