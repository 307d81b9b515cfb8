"""Claim: which of a model's variants are faster can be forecast before any of them has run.

    python -m benchmarks.forecasting.variant_ranking --out benchmarks/results/forecast_variants.json \
        [--shapes 2] [--llm NAME=SPEC ... [--llm-only]]
    python -m benchmarks.forecasting.variant_ranking --measure --out FILE.jsonl [--null] [--seconds 1500]
    python -m benchmarks.forecasting.variant_ranking --report --measured FILE.jsonl --out FILE [--forecasts FILE...]

The first needs no GPU: every recorded variant is traced and forecast against its base kernel, by the learned
surrogate fitted to recorded tables without all kernels of the family; once with nothing measured, once with
the base's own configs measured as the tables have them (no variant is); and by the language models that are
named. Per variant: P(its best config is faster than the base's best), mean and sd of log2 of their ratio,
P(none of its configs runs), its most promising configs. Digests say which texts and tables were read; the
date and the digest of this file in what was measured say which came first. `--llm-only` fits nothing: the
shipped surrogate chooses the configs that are shown, and only the models' words are recorded.

`--measure` runs on a GPU, a process per kernel: it tunes the base, checks every variant against the
reference, times a few configs of it and its best in turns with the base's. Lines are written as they come,
and a second run goes on where the first ended. `--report` joins both into one table of figures.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib import result_files
from benchmarks.lib.environment import ROOT
from benchmarks.lib.result_files import say
from benchmarks.lib.surrogates_without import shipped_surrogate, surrogate_without, table_paths
from benchmarks.lib.variants import variant_corpus
from benchmarks.lib.variants.variant_forecasts import (
    file_digest,
    first_cases_of,
    forecast_case,
    language_model,
    source_mark,
    variant_question,
)
from benchmarks.lib.variants.variant_measurement import measure_kernel, measure_variants
from benchmarks.lib.variants.variant_report import join_forecasts, report
from forecast_autotune.features.feature_vectors import VERSION as VECTOR
from forecast_autotune.llm.prompt import FORECAST_VERSION
from forecast_autotune.surrogates.learned import LearnedSurrogate
from forecast_autotune.tuning.replays.replay import load
from forecast_integrations.triton.null_device import null_device
from forecast_train.evaluation.splits import make_folds

RECORDED_FORECASTS = ROOT / "benchmarks" / "results" / "forecast_variants.json"


def forecast_all_variants(a: Namespace, report: result_files.ResultFile) -> None:
    """Forecast every variant; results are added kernel by kernel."""
    found = variant_corpus.variant_sources(a.only.split(",") if a.only else None)
    paths = table_paths()
    tables = load(paths)
    devices = Counter(t.problem.device for t in tables if "H200" in t.problem.device.name)
    ((device, _),) = devices.most_common(1)
    by_family = {fold.name: fold for fold in make_folds(tables, "family")}
    report.data["raw"]["provenance"] = {
        "variants": file_digest(variant_corpus.TABLE),
        "tables": {path.name: file_digest(path) for path in paths},
        "device": device.to_json(),
        "features": VECTOR,
        "measured_before": 0,
    }
    kernels_ = sorted({one.kernel for one in found}, key=lambda k: (first_cases_of(k, 1)[0].family, k))
    kept: dict[str, LearnedSurrogate] = {}
    known: dict[str, dict[str, str]] = {}
    for kernel in kernels_:
        mine = [one for one in found if one.kernel == kernel]
        family = first_cases_of(kernel, 1)[0].family
        if family not in kept:
            kept = {family: shipped_surrogate() if a.llm_only else surrogate_without(family, by_family)}
        learned = kept[family]
        models = {name: language_model(spec, learned, a.timeout) for name, spec in a.llm}
        for case in first_cases_of(kernel, a.shapes):
            begin = time.perf_counter()
            with null_device():
                asked = variant_question(case, mine, known, device=device)
            said = forecast_case(asked, learned, tables, models, plain=not a.llm_only)
            row: dict[str, Any] = {
                "case": case.name,
                "family": family,
                "base_sha256": asked.query.problem.kernel.source_sha256[:16],
                "fit": dict(learned.model.about or {}),
                "surrogate": f"{learned.name}/{learned.version}",
                # Where weights lie, or who serves them, is this machine's affair.
                "language_models": {
                    name: f"{FORECAST_VERSION}/{m.calibration.mark()}" for name, m in models.items()
                },
                "configs": {n: len(asked.rows(n)) for n in asked.records} | {"base": len(asked.base)},
                "untraced": asked.untraced(),
                "sha256": {one.name: source_mark(one) for one in mine},
                "expect": {one.name: one.expect for one in mine},
                "seconds": round(time.perf_counter() - begin, 1),
                "forecasts": said,
            }
            report.add("cases", row)
            for name, rows in said.items():
                best = max(rows, key=lambda v: rows[v]["p_faster"])
                say(f"{case.name}: {name}: likeliest {best}, {rows[best]}")
            say(f"{case.name}: {len(mine)} variants in {row['seconds']} s")
    report.finish(_summary(report.data["raw"].get("cases", [])))


def _summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    names = list(dict.fromkeys(name for case in cases for name in case["forecasts"]))
    expected = {v: case["expect"][v] for case in cases for v in case["expect"]}
    found: dict[str, Any] = {
        "kernels": len({case["case"].partition("/")[0] for case in cases}),
        "variants": len(expected),
        "cases": len(cases),
        "forecasts": sum(len(rows) for case in cases for rows in case["forecasts"].values()),
    }
    for name in names:
        rows = [(v, r) for case in cases for v, r in case["forecasts"].get(name, {}).items()]
        by_expectation = {
            e: [r["p_faster"] for v, r in rows if expected[v] == e] for e in variant_corpus.EXPECTATIONS
        }
        found[name] = {
            "likely_faster": sum(r["p_faster"] > 0.5 for _, r in rows),
            "mean_p_faster": round(sum(r["p_faster"] for _, r in rows) / len(rows), 4),
            "mean_p_faster_by_authors_expectation": {
                e: round(sum(p) / len(p), 4) for e, p in by_expectation.items() if p
            },
        }
    return found


def _parse_spec(text: str) -> tuple[str, str]:
    name, equals, spec = text.partition("=")
    if not equals or not name or not spec:
        raise ValueError(text)
    return name, spec


def main() -> int:
    parser = result_files.parser(__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--measure", action="store_true", help="on a GPU: what became of them")
    what.add_argument("--report", action="store_true", help="join forecasts and measurements")
    parser.add_argument("--only", default="", help="comma-separated kernels or variants")
    parser.add_argument(
        "--shapes", type=int, default=2, help="shapes of each kernel; measuring takes the first"
    )
    parser.add_argument("--llm", action="append", type=_parse_spec, default=[], metavar="NAME=SPEC")
    parser.add_argument("--llm-only", action="store_true", help="record nothing but the models' forecasts")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of one question to a model")
    parser.add_argument(
        "--forecasts",
        type=Path,
        nargs="+",
        default=[RECORDED_FORECASTS],
        help="what the first mode has written",
    )
    parser.add_argument("--measured", type=Path, help="what --measure has written")
    parser.add_argument("--configs", type=int, default=4, help="configs of a variant that are timed")
    parser.add_argument("--rounds", type=int, default=60, help="launches of each in the final timing")
    parser.add_argument("--seconds", type=float, default=1500.0, help="start nothing after so many")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds without a line: a variant hangs")
    parser.set_defaults(stub_only="--measure" not in sys.argv)
    a = result_files.parse_arguments(parser)
    if a.child:
        torch.set_num_threads(1)
        measure_kernel(a.given, a.null)
        return 0
    if a.llm_only and not a.llm:
        parser.error("--llm-only needs --llm NAME=SPEC")
    if a.measure:
        return measure_variants(__file__, a)
    if a.report:
        if a.measured is None:
            parser.error("--report needs --measured FILE, as --measure has written it")
        table = report(join_forecasts(a.forecasts, a.measured))
        made = result_files.ResultFile(a, "forecast_variants_report")
        made.data["raw"] = table.pop("raw")
        made.finish(table)
        return 0
    named = Namespace(**{**vars(a), "llm": [name for name, _ in a.llm]})
    forecast_all_variants(a, result_files.ResultFile(named, "forecast_variants", 0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
