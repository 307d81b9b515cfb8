"""Claim: advice of a language model, written blind, makes decisions on kernels that were never seen better.

    python -m benchmarks.forecasting.advice --models FOLDER --out RESULT.json [--each 3] [--jobs 2] [--only softmax]

Every kernel of the corpus with recorded advice (`benchmarks/data/advice.jsonl.gz`), `--each` of its problems drawn
at random, those of `direct_answers.jsonl.gz` first. The surrogates in `--models` were fitted without the kernel's
family, and so are the weights by which advice is followed. Decisions of the default policy are replayed with it
(`advice`, both cost functions of each kernel) and without (`learned`): regret, measurements and misses.
Replays of recorded H200 timings on a CPU; intervals are 95 %, over kernels, and paired.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import multiprocessing
import random
import sys
import warnings
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.lib import result_files
from benchmarks.lib.recorded_advice import (
    ADVICE_TABLE,
    DATA,
    FamilyModels,
    FollowingAdvice,
    advice_by_source,
    advised_tables,
    decision_figures,
    kernel_label,
    paired_figures,
)
from benchmarks.lib.result_files import say
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_train.splits import family_of
from forecast_train.surrogate.advice_weights import advice_evidence, fit_advice_weights


def answered_problems() -> set[str]:
    """Problems that a model also forecast candidate by candidate."""
    with gzip.open(DATA / "direct_answers.jsonl.gz", "rt", encoding="utf-8") as stream:
        return {line["problem"] for line in map(json.loads, stream) if line["type"] == "answer"}


def choose_problems(tables: Sequence[Table], each: int, wanted: Collection[str], seed: int) -> list[Table]:
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


def play_kernel(work: tuple[Namespace, str, list[Table]]) -> dict[str, Any]:
    """Both arms on the problems of one kernel; the weights are those of its family."""
    options, kernel, chosen = work
    warnings.simplefilter("ignore")
    settings, family = Settings.from_environment(), family_of(chosen[0].problem)
    base: Any = FamilyModels(options.models, [family]).without(family)
    arms: dict[str, Surrogate] = {
        "learned": base,
        "advice": FollowingAdvice(base, advice_by_source(), options.weights[family]),
    }
    rows = [
        {
            "kernel": kernel,
            "problem": table.problem.extra["label"],
            "arm": name,
            **decision_figures(table, arm, settings),
        }
        for table in chosen
        for name, arm in arms.items()
    ]
    return {"kernel": kernel, "rows": rows}


def fit_weights(options: Namespace, tables: Sequence[Table], advice: Mapping[str, Any]) -> dict[str, Any]:
    """Weights of advice by family, fitted without it."""
    families = sorted({family_of(t.problem) for t in tables})
    models = FamilyModels(options.models, families)
    evidence = []
    for table in tables:
        family = family_of(table.problem)
        base: Any = models.without(family)
        one = advice[table.problem.kernel.source_sha256]
        of_table = advice_evidence(
            table, one, base, kernel=kernel_label(table), family=family, seed=options.seed
        )
        evidence += [of_table] if of_table is not None else []
    say(f"weights: {len(evidence)} problems")
    return {f: fit_advice_weights([e for e in evidence if e.family != f]) for f in families}


def main() -> int:
    parser = result_files.parser(__doc__)
    parser.add_argument("--models", type=Path, required=True, help="surrogates without a family each")
    parser.add_argument("--each", type=int, default=3, help="problems of a kernel")
    parser.add_argument("--only", default="", help="comma-separated kernels")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(stub_only=True)
    options = result_files.parse_arguments(parser)
    report = result_files.ResultFile(options, "advice", seed=options.seed)
    warnings.simplefilter("ignore")
    advice = advice_by_source()
    chosen = choose_problems(advised_tables(advice), options.each, answered_problems(), options.seed)
    options.weights = fit_weights(options, chosen, advice)
    only = set(filter(None, options.only.split(",")))
    work = [
        (options, kernel, [t for t in chosen if kernel_label(t) == kernel])
        for kernel in sorted({kernel_label(t) for t in chosen})
        if not only or kernel in only
    ]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for done in pool.map(play_kernel, work):
            rows += done["rows"]
            report.data["raw"].setdefault("kernels", []).append(done)
            say(f"{len(report.data['raw']['kernels'])} of {len(work)}: {done['kernel']}")
    weights = {f: {n: round(v, 4) for n, v in vars(w).items()} for f, w in options.weights.items()}
    digest = hashlib.sha256(ADVICE_TABLE.read_bytes()).hexdigest()[:16]
    report.finish({"advice_table": digest, "weights": weights, **paired_figures(rows)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
