"""Claim: advice of a language model, written blind, makes decisions on kernels that were never seen better.

    python -m benchmarks.forecasting.advice --models FOLDER --out RESULT.json [--each 3] [--jobs 2] [--only softmax]

Every kernel of the corpus with recorded advice (`benchmarks/data/advice.jsonl.gz`), `--each` of its problems drawn
at random; of 72 kernels the problem that a model also forecast candidate by candidate
(`direct_answers.jsonl.gz`). The surrogates in `--models` were fitted without the kernel's family, and so are the
weights by which advice is followed. Arms: `learned`; `advice` (both cost functions of each kernel), `advice-1`
and `advice-2` (one of them, first problems); and, where there are direct forecasts, `direct` and `ensemble` (advice
and direct). Of each arm: the config forecast best, unmeasured; regret after 3 and 5 measurements, those of
the default policy; regret, measurements and misses of the default policy; rank correlation, RMSE and log score
of the forecasts of candidates within twice the best time.

`equal_risk`: how many measurements each arm needs for the misses that `learned` has at an accepted risk of 10 %.
P(miss) is a logistic function of the stated risk and the numbers measured, fitted without the family, for all
arms alike. With `--without-ir` no surrogate may read IR: advice is all that is known then, and its weight is
set, not fitted. `other_shapes`: a second problem of the kernel, with what the same arm measured of the first.
Replays of recorded H200 timings on a CPU; intervals are 95 %, over kernels, and paired.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import multiprocessing
import random
import sys
import warnings
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib import result_files
from benchmarks.lib.advice.arms import ALONE, ARMS, ArmContext, open_arms
from benchmarks.lib.advice.figures import equal_risk, paired_figures
from benchmarks.lib.advice.surrogates import ADVICE_TABLE, FamilyModels, advice_by_source
from benchmarks.lib.environment import ROOT
from benchmarks.lib.result_files import say
from benchmarks.lib.surrogates_without import table_paths
from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.records import Candidate
from forecast_autotune.records.problem import FACTS
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.protocol import Query, Relative, Surrogate
from forecast_autotune.tuning.replays.replay import load, replay_one
from forecast_train.splits import family_of
from forecast_train.surrogate.advice_weights import advice_evidence, fit_advice_weights
from forecast_train.surrogate.replays import observe_replay

DIRECT_TABLE = ROOT / "benchmarks" / "data" / "direct_answers.jsonl.gz"
NEAR_TABLE = ROOT / "benchmarks" / "data" / "corpus_h200_near.jsonl.gz"
_LEAST_CANDIDATES = 6
_FAST_LOG2 = 1.0
"""Candidates that count for rank correlation and errors: within a factor of two of the best."""


def kernel_label(table: Table) -> str:
    """The benchmark kernel that a table is of."""
    return str(table.problem.extra["label"]).partition("/")[0]


def direct_answers(path: Path = DIRECT_TABLE) -> dict[str, dict[str, float]]:
    """log2 slow-down by config, as text, by problem."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        lines = [json.loads(line) for line in stream]
    found: dict[str, dict[str, float]] = {}
    for line in lines:
        if line["type"] == "answer":
            shown = [
                json.dumps(Candidate.from_json(c).config.to_json(), sort_keys=True) for c in line["configs"]
            ]
            found[line["problem"]] = dict(zip(shown, line["log2_slowdown"], strict=True))
    return found


def choose_problems(tables: Sequence[Table], each: int, wanted: Mapping[str, Any], seed: int) -> list[Table]:
    """`each` problems of every kernel, the wanted ones among them."""
    by: dict[str, list[Table]] = {}
    for table in tables:
        by.setdefault(kernel_label(table), []).append(table)
    chosen = []
    for kernel in sorted(by):
        first = [t for t in by[kernel] if t.problem.id in wanted]
        rest = [t for t in by[kernel] if t.problem.id not in wanted]
        random.Random(f"{seed} {kernel}").shuffle(rest)
        chosen += [*first, *rest][:each]
    return chosen


def score_table(table: Table, arm: Surrogate, settings: Settings) -> dict[str, Any]:
    """The figures of one arm on one problem."""
    rows = table.by_candidate()
    names = CandidateList.of(list(rows))
    grids = {m.candidate: m.grid for m in table.measurements if m.grid is not None}
    forecasts = arm.forecast(Query(table.problem, names, grids, ttir=table.problem.ttir))
    true = np.array([math.log2(rows[c].ms) if rows[c].ok else math.nan for c in names])
    best = float(np.nanmin(true))
    first = true[int(forecasts.order()[0])]
    fast = np.isfinite(true) & (true < best + _FAST_LOG2)
    error = forecasts.mean[fast] - true[fast]
    error -= error.mean()
    sd = np.maximum(forecasts.uncalibrated().sd[fast], 1e-3)
    # The level is unknown before anything ran: what is scored is the rest, with a floor for noise.
    spread = np.sqrt(np.maximum(sd**2 - float(np.min(sd)) ** 2, 0.0) + 0.1**2)
    found: dict[str, Any] = {
        "unmeasured": 2.0 ** (float(first) - best) - 1 if math.isfinite(first) else 9.0,
        "spearman": _rank_correlation(forecasts.mean[np.isfinite(true)], true[np.isfinite(true)]),
        "rmse": float(np.sqrt(np.mean(error**2))),
        "log_score": float(np.mean(0.5 * (error / spread) ** 2 + np.log(spread))),
    }
    for count in (3, 5):
        few = replace(settings, max_measurements=count, risk=0.001)
        found[f"after_{count}"] = replay_one(table, surrogate=arm, policy=None, settings=few)[0].regret
    row, seen = replay_one(table, surrogate=arm, policy=None, settings=settings)
    found |= {
        "regret": row.regret,
        "measured": row.measured,
        "candidates": row.candidates,
        "stated_risk": row.stated_risk,
        "missed": float(row.regret > settings.tolerance + 1e-9),
    }
    found["seen"] = tuple(seen)
    return found


def play_kernel(work: tuple[Namespace, str, list[Table], list[Table]]) -> dict[str, Any]:
    """Every arm on the problems of one kernel; the weights are those of its family."""
    options, kernel, chosen, others = work
    warnings.simplefilter("ignore")
    settings = Settings.from_environment()
    family = family_of(chosen[0].problem)
    arms = open_arms(ArmContext(options.models, family, options.weights[family], options.direct))
    rows: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    shapes: list[dict[str, Any]] = []
    for number, table in enumerate(chosen):
        answered = table.problem.id in options.direct
        for name in ARMS:
            if (name in ("direct", "ensemble") and not answered) or (name in ALONE and number):
                continue
            arm = arms[name]
            found = score_table(table, arm, settings)
            seen = found.pop("seen")
            rows.append({"kernel": kernel, "problem": table.problem.extra["label"], "arm": name, **found})
            if name not in ("learned", "advice"):
                continue
            watched, _ = observe_replay(table, arm, seed=options.seed, relatives=())
            steps.append(
                {
                    "kernel": kernel,
                    "family": family,
                    "problem": table.problem.extra["label"],
                    "arm": name,
                    "candidates": len(table.by_candidate()),
                    "steps": [
                        [s.own, s.new, round(s.risk, 5), s.beaten] for s in watched if s.beaten is not None
                    ],
                }
            )
            if number == 0 and others:
                shapes += [
                    {"kernel": kernel, "arm": name, **_at_other_shape(t, table, seen, arm, settings)}
                    for t in others
                ]
    return {"kernel": kernel, "rows": rows, "steps": steps, "shapes": shapes}


def _at_other_shape(
    table: Table, known: Table, seen: Sequence[Any], arm: Surrogate, settings: Settings
) -> dict[str, Any]:
    relatives = [Relative(known.problem, tuple(seen))]
    few = replace(settings, max_measurements=3, risk=0.001)
    after = replay_one(table, surrogate=arm, policy=None, settings=few, relatives=relatives)[0]
    row, _ = replay_one(table, surrogate=arm, policy=None, settings=settings, relatives=relatives)
    return {
        "problem": table.problem.extra["label"],
        "after_3": after.regret,
        "regret": row.regret,
        "measured": row.measured,
        "missed": float(row.regret > settings.tolerance + 1e-9),
    }


def _rank_correlation(one: Any, other: Any) -> float:
    from scipy.stats import spearmanr

    found = float(spearmanr(one, other)[0])
    return found if math.isfinite(found) else 0.0


def map_without_ir(tables: Sequence[Table]) -> list[Table]:
    """The tables without their IR, and without what was read of it."""
    found = []
    for table in tables:
        extra = {name: value for name, value in table.problem.extra.items() if name != FACTS}
        found.append(Table(replace(table.problem, ttir={}, extra=extra), table.measurements))
    return found


def fit_weights(options: Namespace, tables: Sequence[Table], advice: Mapping[str, Any]) -> dict[str, Any]:
    """Weights of advice by family, fitted without it."""
    families = sorted({family_of(t.problem) for t in tables})
    models = FamilyModels(options.models, families)
    evidence = []
    for table in tables:
        family = family_of(table.problem)
        base: Any = models.without(family)
        one = advice[table.problem.kernel.source_sha256]
        found = advice_evidence(
            table, one, base, kernel=kernel_label(table), family=family, seed=options.seed
        )
        evidence += [found] if found is not None else []
    say(f"weights: {len(evidence)} problems")
    return {f: fit_advice_weights([e for e in evidence if e.family != f]) for f in families}


def main() -> int:
    made = result_files.parser(__doc__)
    made.add_argument("--models", type=Path, required=True, help="learned surrogates without a family each")
    made.add_argument("--each", type=int, default=3, help="problems of a kernel")
    made.add_argument("--only", default="", help="comma-separated kernels")
    made.add_argument("--jobs", type=int, default=1)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--without-ir", action="store_true", help="as where no IR can be read")
    made.set_defaults(stub_only=True)
    options = result_files.parse_arguments(made)
    report = result_files.ResultFile(options, "advice", seed=options.seed)
    warnings.simplefilter("ignore")
    advice = advice_by_source()
    tables = [
        t
        for t in load([*table_paths(), NEAR_TABLE])
        if t.problem.kernel.source_sha256 in advice and len(t.by_candidate()) >= _LEAST_CANDIDATES
    ]
    options.direct = direct_answers()
    chosen = choose_problems(tables, options.each, options.direct, options.seed)
    if options.without_ir:
        tables, chosen = [map_without_ir(some) for some in (tables, chosen)]
        options.direct = {}
    families = {family_of(t.problem) for t in chosen}
    options.weights = dict.fromkeys(families) if options.without_ir else fit_weights(options, chosen, advice)
    only = set(filter(None, options.only.split(",")))
    work = []
    for kernel in sorted({kernel_label(t) for t in chosen}):
        if only and kernel not in only:
            continue
        mine = [t for t in chosen if kernel_label(t) == kernel]
        used = {t.problem.id for t in mine}
        rest = [t for t in tables if kernel_label(t) == kernel and t.problem.id not in used]
        work.append((options, kernel, mine, rest[:1] or mine[1:2]))
    found: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for done in pool.map(play_kernel, work):
            found.append(done)
            report.data["raw"].setdefault("kernels", []).append(done)
            say(f"{len(found)} of {len(work)}: {done['kernel']}")
    rows = [r for one in found for r in one["rows"]]
    report.finish(
        {
            "advice": hashlib.sha256(ADVICE_TABLE.read_bytes()).hexdigest()[:16],
            "direct": hashlib.sha256(DIRECT_TABLE.read_bytes()).hexdigest()[:16],
            "weights": {
                f: {n: round(v, 4) for n, v in vars(w).items()} for f, w in options.weights.items() if w
            },
            **paired_figures(rows),
            "equal_risk": equal_risk([s for one in found for s in one["steps"]]),
            "other_shapes": paired_figures([s for one in found for s in one["shapes"]]),
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
