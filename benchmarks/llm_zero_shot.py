"""Claim: as they come, small language models know nothing about configs that the gate would pay for.

    python benchmarks/llm_zero_shot.py --out benchmarks/results/llm_zero_shot_cpu.json \
        --llm SmolLM2-135M=transformers:PATH [--llm NAME=SPEC ...] [--answers DIR] [--sample 16] [--limit N]

Every problem of the shipped tables is asked about once per model, with nothing measured, in the words that
an ensemble would use: `--sample` candidates of each, the fastest forecast and others by lot from equal
stretches of the forecast order (0: all). Scores are the paper's (`forecast_train.evaluation.binned`) on these
candidates: of the model's own words, of the same after a calibration fitted to the other families, and, on
the very same candidates, of forecasts that need no language model: uniform, the labels' shares on the
other families, the cost formula, and the learned surrogate fitted without the family. Then the calibration
that the tuner would use: its weight beside the learned surrogate, and what the gate says to six, a hundred
and a thousand candidates on a warm process. Answers are kept in `--answers`, so a run can be taken up.
Seconds are of this machine, whatever else ran on it; the recorded run had two busy cores.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Report, say
from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.calibration import Calibration
from forecast_autotune.llm.gate import Situation, judge
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.protocol import Query, Surrogate
from forecast_autotune.tuning.replay import load, shipped
from forecast_integrations.models.open import backend
from forecast_train.evaluation import metrics
from forecast_train.evaluation.baselines import Formula
from forecast_train.evaluation.binned import Binned, ece, labels_of, recovered, scored, stated_bins
from forecast_train.evaluation.splits import folds, spread
from forecast_train.llm.calibrate import calibrate, corrected
from forecast_train.llm.hearing import Heard, hear
from forecast_train.llm.saving import play, summarize
from forecast_train.surrogate.fit import fit

Array = npt.NDArray[np.float64]
SIZES = (6, 100, 1000)
"""Candidates that the gate is asked about."""


def options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--llm", action="append", required=True, metavar="NAME=SPEC")
    made.add_argument("--answers", type=Path, help="a directory (default: beside --out)")
    made.add_argument("--sample", type=int, default=16)
    made.add_argument("--limit", type=int, help="only so many problems, in turn from each kernel")
    given = made.parse_args()
    if bad := [text for text in given.llm if "=" not in text]:
        made.error(f"--llm {bad[0]}: NAME=SPEC, for example SmolLM2-135M=transformers:PATH")
    return given


def row(p: Array, h: Heard) -> tuple[Binned, float, bool]:
    """Scores of probabilities [m, labels] of one problem, Spearman of the expected bin, recovery."""
    expected = p @ np.arange(len(BINS) + 1)
    times = h.log2_ms[h.rows]
    ran = np.isfinite(times)
    found = recovered(np.argsort(expected, kind="stable"), times)
    return scored(p, labels_of(h.ratios)), metrics.spearman(expected[ran], times[ran]), found


def figures(rows: Sequence[tuple[Binned, float, bool]]) -> dict[str, float]:
    """Means over problems; ECE and AURC over all candidates."""
    binned = [b for b, _, _ in rows]
    confidence = np.concatenate([b.confidence for b in binned])
    hit = np.concatenate([b.hit for b in binned]).astype(bool)
    found = {
        name: float(np.mean([getattr(b, name) for b in binned]))
        for name in ("accuracy", "off_by_one", "brier", "rps", "nll")
    }
    return {
        **found,
        "ece": ece(confidence, hit),
        "aurc": metrics.aurc(confidence, 1.0 - hit),
        "spearman": float(np.mean([s for _, s, _ in rows])),
        "top10pct_within_20pct": float(np.mean([r for _, _, r in rows])),
        "problems": len(rows),
    }


def compared(heard: Sequence[Heard], say_bins: Callable[[Heard], Array]) -> dict[str, float]:
    """The figures of a way of stating bins, on the candidates that were asked about and answered."""
    return figures([row(say_bins(h), h) for h in heard])


def forecast_bins(tables: Sequence[Table], heard: Sequence[Heard]) -> dict[str, dict[str, float]]:
    """The same scores for surrogates that need no model, on the very same candidates."""
    by_id = {h.problem: h for h in heard}
    found: dict[str, list[tuple[Binned, float, bool]]] = {"formula": [], "learned": []}
    for fold in folds(tables, "family"):
        makers: dict[str, Surrogate] = {"formula": Formula(), "learned": fit(fold.train)}
        for table in fold.test:
            h = by_id[table.problem.id]
            query = Query(table.problem, list(table.by_candidate()), table.grids(), ttir=table.problem.ttir)
            for name, surrogate in makers.items():
                forecasts = surrogate.forecast(query)
                # What the bins were relative to: the formula's best, which has a ratio of 0.
                zero = int(h.rows[np.nanargmin(np.abs(h.ratios))])
                found[name].append(row(stated_bins(forecasts, h.rows, zero), h))
    return {name: figures(rows) for name, rows in found.items()}


def usual(heard: Sequence[Heard], h: Heard) -> Array:
    """The labels' shares on the other families (one more of each), for every candidate."""
    counts = np.ones(len(BINS) + 1)
    for other in heard:
        if other.family != h.family:
            counts += np.bincount(labels_of(other.ratios), minlength=len(counts)) / len(other.rows) * 4
    return np.tile(counts / counts.sum(), (len(h.rows), 1))


def progressed(name: str, done: int, total: int, what: str) -> None:
    """One line."""
    say(f"{name}: {done}/{total} {what}")


def uniform(h: Heard) -> Array:
    """The same probability for every label."""
    return np.full((len(h.rows), len(BINS) + 1), 1.0 / (len(BINS) + 1))


def judged(calibration: Calibration) -> dict[str, Any]:
    """What the gate says on a warm process with 16 compile workers."""
    return {
        str(n): asdict(
            judge(
                Situation(
                    n,
                    16,
                    0.5,
                    calibration.saved,
                    min(n, 256),
                    calibration.pace.per_token_s,
                    load_s=0.0,
                )
            )
        )
        for n in SIZES
    }


def examined(tables: Sequence[Table], heard: Sequence[Heard]) -> dict[str, Any]:
    """Everything that is reported of one model."""
    families = sorted({h.family for h in heard})
    apart = {f: corrected([h for h in heard if h.family != f]) for f in families}
    whole = calibrate(heard)
    spreads = [float(h.stated.std(axis=0).max()) for h in heard]
    means = [BINS.moments(h.stated)[0] for h in heard]
    return {
        "as it comes": compared(heard, lambda h: h.stated),
        "calibrated on other families": compared(heard, lambda h: apart[h.family].cooled(h.stated)),
        "label_mass": float(np.mean([h.mass.mean() for h in heard])),
        "largest_sd_of_a_probability_between_candidates": float(np.mean(spreads)),
        "sd_of_expected_log2_ratio_between_candidates": float(np.mean([m.std() for m in means])),
        "calibration": {
            "temperature": whole.temperature,
            "weights": {k: asdict(w) for k, w in whole.weights.items()},
            "fail_weight": whole.fail_weight,
            "skilled": whole.skilled,
        },
        "saving": summarize(play(tables, heard, learn=fit)).to_json() if whole.skilled else None,
        "gate": judged(whole),
        "seconds_per_problem": float(np.median([h.seconds for h in heard])),
        "tokens_per_problem": float(np.mean([h.tokens for h in heard])),
    }


def main() -> None:
    given = options()
    # A folder on this machine is nobody else's business: a model goes by its name.
    named = argparse.Namespace(**{**vars(given), "llm": [text.split("=", 1)[0] for text in given.llm]})
    report = Report(named, "llm_zero_shot")
    tables = load(shipped())
    tables = tables if given.limit is None else spread(tables, given.limit)
    answers = given.answers or given.out.parent
    answers.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"problems": len(tables), "candidates_per_problem": given.sample or "all"}
    for text in given.llm:
        name, spec = text.split("=", 1)
        model = backend(spec, cached=False)
        model.name = name
        begin = time.perf_counter()
        heard = hear(
            tables,
            model,
            sample=given.sample or None,
            timeout_s=3600.0,
            kept=answers / f"llm_zero_shot_{name}.jsonl",
            progress=partial(progressed, name),
        )
        model.close()
        say(f"{name}: heard after {time.perf_counter() - begin:.0f} s")
        summary[name] = examined(tables, heard)
        report.add(name, [asdict_of(h) for h in heard])
        if "uniform" not in summary:
            summary["uniform"] = compared(heard, uniform)
            summary["shares on other families"] = compared(heard, partial(usual, heard))
            summary |= forecast_bins(tables, heard)
        report.finish(summary)


def asdict_of(h: Heard) -> dict[str, Any]:
    """What is kept of one problem in the result file: enough to compute every score again."""
    data = h.to_json()
    kept = ("label", "family", "rows", "stated", "mass", "ratios", "tokens", "seconds")
    return {k: data[k] for k in kept} | {
        "log2_ms": [x if x is None or math.isfinite(x) else None for x in data["log2_ms"]]
    }


if __name__ == "__main__":
    main()
