"""Claim: as they come, small language models know nothing about configs that the gate would pay for.

    python -m benchmarks.llm.zero_shot_models --out benchmarks/results/llm_zero_shot_cpu.json \
        --llm SmolLM2-135M=transformers:PATH [--llm NAME=SPEC ...] [--answers DIR] [--sample 16] [--limit N]

Every problem of the shipped tables is asked about once per model, with nothing measured, in the words that
an ensemble would use: `--sample` candidates of each, the fastest forecast and others by lot from equal
stretches of the forecast order (0: all). Scores are the paper's (`forecast_train.evaluation.bin_scores`) on these
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
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.lib.result_files import ResultFile, say
from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.calibration import LLMCalibration
from forecast_autotune.llm.gate import GateInputs, decide_asking
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.protocol import Query, Surrogate
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_integrations.models.factory import backend
from forecast_train.evaluation import metrics
from forecast_train.evaluation.baselines import FormulaBaseline
from forecast_train.evaluation.bin_scores import (
    BinScores,
    bin_labels,
    bins_from_forecasts,
    ece,
    found_near_best,
    score_bins,
)
from forecast_train.evaluation.splits import make_folds, spread_over_kernels
from forecast_train.llm.calibration.answer_collection import ModelAnswers, collect_answers
from forecast_train.llm.calibration.calibrate import fit_calibration, fit_corrections
from forecast_train.llm.calibration.saving_estimate import estimate_saving, replay_pairs
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


def problem_scores(p: Array, h: ModelAnswers) -> tuple[BinScores, float, bool]:
    """Scores of probabilities [m, labels] of one problem, Spearman of the expected bin, recovery."""
    expected = p @ np.arange(len(BINS) + 1)
    times = h.log2_ms[h.rows]
    ran = np.isfinite(times)
    found = found_near_best(np.argsort(expected, kind="stable"), times)
    return score_bins(p, bin_labels(h.ratios)), metrics.spearman(expected[ran], times[ran]), found


def mean_scores(rows: Sequence[tuple[BinScores, float, bool]]) -> dict[str, float]:
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


def scores_on_answered(
    heard: Sequence[ModelAnswers], say_bins: Callable[[ModelAnswers], Array]
) -> dict[str, float]:
    """The figures of a way of stating bins, on the candidates that were asked about and answered."""
    return mean_scores([problem_scores(say_bins(h), h) for h in heard])


def baseline_scores(tables: Sequence[Table], heard: Sequence[ModelAnswers]) -> dict[str, dict[str, float]]:
    """The same scores for surrogates that need no model, on the very same candidates."""
    by_id = {h.problem: h for h in heard}
    found: dict[str, list[tuple[BinScores, float, bool]]] = {"formula": [], "learned": []}
    for fold in make_folds(tables, "family"):
        makers: dict[str, Surrogate] = {"formula": FormulaBaseline(), "learned": fit(fold.train)}
        for table in fold.test:
            h = by_id[table.problem.id]
            query = Query(table.problem, list(table.by_candidate()), table.grids(), ttir=table.problem.ttir)
            for name, surrogate in makers.items():
                forecasts = surrogate.forecast(query)
                # What the bins were relative to: the formula's best, which has a ratio of 0.
                zero = int(h.rows[np.nanargmin(np.abs(h.ratios))])
                found[name].append(problem_scores(bins_from_forecasts(forecasts, h.rows, zero), h))
    return {name: mean_scores(rows) for name, rows in found.items()}


def label_shares(heard: Sequence[ModelAnswers], h: ModelAnswers) -> Array:
    """The labels' shares on the other families (one more of each), for every candidate."""
    counts = np.ones(len(BINS) + 1)
    for other in heard:
        if other.family != h.family:
            counts += np.bincount(bin_labels(other.ratios), minlength=len(counts)) / len(other.rows) * 4
    return np.tile(counts / counts.sum(), (len(h.rows), 1))


def log_progress(name: str, done: int, total: int, what: str) -> None:
    """One line."""
    say(f"{name}: {done}/{total} {what}")


def uniform_bins(h: ModelAnswers) -> Array:
    """The same probability for every label."""
    return np.full((len(h.rows), len(BINS) + 1), 1.0 / (len(BINS) + 1))


def gate_answers(calibration: LLMCalibration) -> dict[str, Any]:
    """What the gate says on a warm process with 16 compile workers."""
    return {
        str(n): asdict(
            decide_asking(
                GateInputs(
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


def model_report(tables: Sequence[Table], heard: Sequence[ModelAnswers]) -> dict[str, Any]:
    """Everything that is reported of one model."""
    families = sorted({h.family for h in heard})
    apart = {f: fit_corrections([h for h in heard if h.family != f]) for f in families}
    whole = fit_calibration(heard)
    spreads = [float(h.stated.std(axis=0).max()) for h in heard]
    means = [BINS.moments(h.stated)[0] for h in heard]
    return {
        "as it comes": scores_on_answered(heard, lambda h: h.stated),
        "calibrated on other families": scores_on_answered(
            heard, lambda h: apart[h.family].temperature_scaled(h.stated)
        ),
        "label_mass": float(np.mean([h.mass.mean() for h in heard])),
        "largest_sd_of_a_probability_between_candidates": float(np.mean(spreads)),
        "sd_of_expected_log2_ratio_between_candidates": float(np.mean([m.std() for m in means])),
        "calibration": {
            "temperature": whole.temperature,
            "weights": {k: asdict(w) for k, w in whole.weights.items()},
            "fail_weight": whole.fail_weight,
            "skilled": whole.skilled,
        },
        "saving": estimate_saving(replay_pairs(tables, heard, learn=fit)).to_json()
        if whole.skilled
        else None,
        "gate": gate_answers(whole),
        "seconds_per_problem": float(np.median([h.seconds for h in heard])),
        "tokens_per_problem": float(np.mean([h.tokens for h in heard])),
    }


def main() -> None:
    given = options()
    # A folder on this machine is nobody else's business: a model goes by its name.
    named = argparse.Namespace(**{**vars(given), "llm": [text.split("=", 1)[0] for text in given.llm]})
    report = ResultFile(named, "llm_zero_shot")
    tables = load(shipped_tables())
    tables = tables if given.limit is None else spread_over_kernels(tables, given.limit)
    answers = given.answers or given.out.parent
    answers.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"problems": len(tables), "candidates_per_problem": given.sample or "all"}
    for text in given.llm:
        name, spec = text.split("=", 1)
        model = backend(spec, cached=False)
        model.name = name
        begin = time.perf_counter()
        heard = collect_answers(
            tables,
            model,
            sample=given.sample or None,
            timeout_s=3600.0,
            kept=answers / f"llm_zero_shot_{name}.jsonl",
            progress=partial(log_progress, name),
        )
        model.close()
        say(f"{name}: heard after {time.perf_counter() - begin:.0f} s")
        summary[name] = model_report(tables, heard)
        report.add(name, [answers_to_json(h) for h in heard])
        if "uniform" not in summary:
            summary["uniform"] = scores_on_answered(heard, uniform_bins)
            summary["shares on other families"] = scores_on_answered(heard, partial(label_shares, heard))
            summary |= baseline_scores(tables, heard)
        report.finish(summary)


def answers_to_json(h: ModelAnswers) -> dict[str, Any]:
    """What is kept of one problem in the result file: enough to compute every score again."""
    data = h.to_json()
    kept = ("label", "family", "rows", "stated", "mass", "ratios", "tokens", "seconds")
    return {k: data[k] for k in kept} | {
        "log2_ms": [x if x is None or math.isfinite(x) else None for x in data["log2_ms"]]
    }


if __name__ == "__main__":
    main()
